//! Some of a tensor's heads, as a view of their own.

use core::ops::Range;

use super::{View, ViewMut};
use crate::Error;

impl<T> View<'_, T> {
    /// Some of the heads, axis 1: nothing is copied.
    ///
    /// ```
    /// use headwise_kernels::View;
    /// let data = [1.0, 2.0, 3.0]; // 1 token, 3 heads of 1
    /// let last = View::blhd(&data, [1, 1, 3, 1])?.heads(1..3)?;
    /// assert_eq!((last.shape(), last.get([0, 1, 0, 0])), ([1, 2, 1, 1], Some(3.0)));
    /// # Ok::<(), headwise_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Range`] if the range ends before it starts or beyond the axis.
    pub fn heads(mut self, heads: Range<usize>) -> Result<Self, Error> {
        let skipped = check(&heads, self.shape[1])?;
        self.shape[1] = heads.len();
        // Wrapping: the strides of axes with one element are never used.
        self.ptr = self.ptr.wrapping_offset(self.strides[1].wrapping_mul(skipped));
        if let Some(scales) = &mut self.scales {
            scales.skip(scales.strides[1].wrapping_mul(skipped));
        }
        Ok(self)
    }
}

impl<T> ViewMut<'_, T> {
    /// Some of the heads, as [`View::heads`].
    ///
    /// # Errors
    /// As [`View::heads`].
    pub fn heads(&mut self, heads: Range<usize>) -> Result<ViewMut<'_, T>, Error> {
        let skipped = check(&heads, self.shape[1])?;
        let Self { ptr, mut shape, strides, tokens, _data } = *self;
        shape[1] = heads.len();
        let ptr = ptr.wrapping_offset(strides[1].wrapping_mul(skipped));
        Ok(ViewMut { ptr, shape, strides, tokens, _data })
    }
}

/// The heads before those of the range; none if the range is empty, as no element is reached then.
fn check(heads: &Range<usize>, axis: usize) -> Result<isize, Error> {
    match heads.start <= heads.end && heads.end <= axis {
        true => Ok(if heads.is_empty() { 0 } else { heads.start as isize }),
        false => Err(Error::Range { argument: "heads", got: [heads.start, heads.end], axis }),
    }
}
