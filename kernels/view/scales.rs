//! Scales: the factors of integers, one for each token and head, or for each group of features of it.

use core::marker::PhantomData;

use super::View;
use crate::element::Stored;
use crate::{DType, Error};

/// Where the scales of a view lie: by strides of their own, on the view's axes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scales<'a> {
    ptr: *const f32,
    pub strides: [isize; 4],
    /// Features that share a scale.
    per: usize,
    _data: PhantomData<&'a [f32]>,
}

impl Scales<'_> {
    /// Moves the first one.
    pub fn skip(&mut self, offset: isize) {
        self.ptr = self.ptr.wrapping_offset(offset);
    }
}

impl<'a, C: Stored> View<'a, C> {
    /// Integers with factors: `scales [B, H, L, G]` has one for each of `G` groups of `D / G` features,
    /// rounded up, of each token and head. To be called before [`View::packed`], [`View::paged`] or
    /// [`View::rolling`], which then find tokens and scales alike. A scale that is infinite counts as NaN.
    ///
    /// ```
    /// use headwise_kernels::View;
    /// let (data, scales) = ([100, -50, 3, 4], [0.01, 0.5]); // 2 tokens of 2 features
    /// let view = View::bhld(&data, [1, 1, 2, 2])?.scaled(View::bhld(&scales, [1, 1, 2, 1])?)?;
    /// assert_eq!(view.value([0, 0, 1, 0]), Some(1.5));
    /// # Ok::<(), headwise_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Type`] unless the view is of `i8`; [`Error::Scales`] if the first three sizes differ, if `D`
    /// cannot be cut in `G` groups of one size and a last one that is not longer, or if one of the views is
    /// packed, paged or rolling.
    pub fn scaled(mut self, scales: View<'a, f32>) -> Result<Self, Error> {
        if C::DTYPE != DType::I8 {
            return Err(Error::Type { argument: "scaled", got: C::DTYPE, expected: DType::I8 });
        }
        if !self.is_strided() || !scales.is_strided() {
            return Err(Error::Scales { got: scales.shape, view: self.shape });
        }
        let per = features_per_scale(self.shape, scales.shape)?;
        let View { ptr, strides, .. } = scales;
        self.scales = Some(Scales { ptr, strides, per, _data: PhantomData });
        Ok(self)
    }
}

/// Features that share a scale, at least 1: `scales [B, H, L, G]` of a view `[B, H, L, D]`.
///
/// # Errors
/// [`Error::Scales`] if they do not fit: see [`View::scaled`].
pub(crate) fn features_per_scale(view: [usize; 4], scales: [usize; 4]) -> Result<usize, Error> {
    let (d, groups) = (view[3], scales[3]);
    let per = d.div_ceil(groups.max(1)).max(1);
    let cut = d.div_ceil(per).max(1) == groups;
    if cut && scales[..3] == view[..3] { Ok(per) } else { Err(Error::Scales { got: scales, view }) }
}

/// A scale, NaN for an infinite one: else what came out would depend on which numbers are 0.
#[inline(always)]
pub(crate) fn finite(scale: f32) -> f32 {
    scale + scale * 0.0
}

impl<T: Stored> View<'_, T> {
    /// The number at `index`, of an integer with its scale, or `None` outside the shape or without scales.
    pub fn value(&self, index: [usize; 4]) -> Option<f32> {
        let x = self.get(index)?.to_f32();
        if T::DTYPE != DType::I8 {
            return Some(x);
        }
        let [b, h, token, feature] = index;
        let (scale, group) = (self.scale(b, h, token)?, self.scales?);
        let offset = (feature / group.per) as isize * group.strides[3];
        // SAFETY: the index is inside the shape, so this group has a scale.
        Some(x * finite(unsafe { *scale.wrapping_offset(offset) }))
    }
}

impl<T> View<'_, T> {
    pub(crate) fn is_scaled(&self) -> bool {
        self.scales.is_some()
    }

    /// The first scale of row `[b, h, token]`.
    #[inline(always)]
    pub(crate) fn scale(&self, b: usize, h: usize, token: usize) -> Option<*const f32> {
        let scales = self.scales.as_ref()?;
        Some(scales.ptr.wrapping_offset(self.tokens.offset(scales.strides, b, h, token)))
    }

    /// Strides of tokens and groups of the scales, and the features of a group.
    #[inline(always)]
    pub(crate) fn scale_strides(&self) -> Option<([isize; 2], usize)> {
        self.scales.as_ref().map(|scales| ([scales.strides[2], scales.strides[3]], scales.per))
    }
}
