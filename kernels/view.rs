//! Views: four sizes and four element strides over a slice. The only place where bounds are checked.
//!
//! Element `[i0, i1, i2, i3]` lies at `data[offset + i0*s0 + i1*s1 + i2*s2 + i3*s3]`. A view that exists has
//! every element inside its slice; a `ViewMut` that exists has no two elements in the same place. All unsafe
//! code in this crate leans on these two sentences.

use core::marker::PhantomData;

use crate::Error;
use scales::Scales;
pub(crate) use scales::{features_per_scale, finite};
use tokens::Tokens;

mod heads;
mod scales;
mod tokens;

/// A read-only tensor with four axes: `[batch, head, token, feature]`, or `[batch, head, query, key]` for
/// masks and biases. Strides count elements and may be 0 or negative.
///
/// ```
/// use headwise_kernels::View;
/// let data: Vec<f32> = (0..24).map(|i| i as f32).collect();
/// let tokens_first = View::blhd(&data, [1, 3, 2, 4])?; // 3 tokens, 2 heads of 4
/// assert_eq!(tokens_first.shape(), [1, 2, 3, 4]); // always seen as [B, H, L, D]
/// assert_eq!(tokens_first.get([0, 1, 2, 0]), Some(20.0));
/// # Ok::<(), headwise_kernels::Error>(())
/// ```
#[derive(Debug)]
pub struct View<'a, T> {
    ptr: *const T,
    shape: [usize; 4],
    strides: [isize; 4],
    tokens: Tokens<'a>,
    scales: Option<Scales<'a>>,
    _data: PhantomData<&'a [T]>,
}

/// A writable tensor with four axes in which no two elements overlap. See [`View`].
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    ptr: *mut T,
    shape: [usize; 4],
    strides: [isize; 4],
    tokens: Tokens<'a>,
    _data: PhantomData<&'a mut [T]>,
}

// SAFETY: a `View` is a shared borrow of a slice and a `ViewMut` an exclusive one; they cross threads like
// those.
unsafe impl<T: Sync> Send for View<'_, T> {}
unsafe impl<T: Sync> Sync for View<'_, T> {}
unsafe impl<T: Send> Send for ViewMut<'_, T> {}
unsafe impl<T: Sync> Sync for ViewMut<'_, T> {}

impl<T> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for View<'_, T> {}

impl<'a, T> View<'a, T> {
    /// A view of `data` with the given sizes and element strides; element `[0, 0, 0, 0]` is `data[offset]`.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the sizes multiply beyond `isize`, [`Error::OutOfBounds`] if an element lies
    /// outside `data`.
    pub fn new(data: &'a [T], offset: usize, shape: [usize; 4], strides: [isize; 4]) -> Result<Self, Error> {
        check_bounds(data.len(), offset, shape, strides)?;
        Ok(Self {
            ptr: data.as_ptr().wrapping_add(offset),
            shape,
            strides,
            tokens: Tokens::Strided,
            scales: None,
            _data: PhantomData,
        })
    }

    /// A view of memory that is no one slice: the strided arrays of other libraries, in whose gaps there may
    /// be what others write. Element `[0, 0, 0, 0]` lies at `ptr`.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the sizes multiply beyond `isize`.
    ///
    /// # Safety
    /// For all of `'a`, every element of the view must be valid for reading and not be written.
    pub unsafe fn from_raw_parts(
        ptr: *const T,
        shape: [usize; 4],
        strides: [isize; 4],
    ) -> Result<Self, Error> {
        count(shape).ok_or(Error::TooLarge { argument: "view", shape })?;
        Ok(Self { ptr, shape, strides, tokens: Tokens::Strided, scales: None, _data: PhantomData })
    }

    /// A compact `[B, H, L, D]` tensor, sizes in that order.
    ///
    /// # Errors
    /// As [`View::new`].
    pub fn bhld(data: &'a [T], shape: [usize; 4]) -> Result<Self, Error> {
        Self::new(data, 0, shape, row_major(shape)?)
    }

    /// A compact `[B, L, H, D]` tensor (the tokens outside the heads), sizes in that order. The view itself
    /// has the axes `[B, H, L, D]`, like every other.
    ///
    /// # Errors
    /// As [`View::new`].
    pub fn blhd(data: &'a [T], shape: [usize; 4]) -> Result<Self, Error> {
        Ok(Self::new(data, 0, shape, row_major(shape)?)?.swap_axes(1, 2))
    }

    /// A compact row-major tensor with up to four axes, padded on the left with axes of size 1: what masks
    /// and biases are usually made from.
    ///
    /// # Errors
    /// [`Error::Rank`] for more than four axes, else as [`View::new`].
    pub fn compact(data: &'a [T], sizes: &[usize]) -> Result<Self, Error> {
        let mut shape = [1; 4];
        let pad = 4usize.checked_sub(sizes.len()).ok_or(Error::Rank { rank: sizes.len() })?;
        shape[pad..].copy_from_slice(sizes);
        Self::bhld(data, shape)
    }

    /// The first `n` features, or all if there are fewer.
    pub fn first_features(mut self, n: usize) -> Self {
        self.shape[3] = self.shape[3].min(n);
        self
    }

    /// The sizes of the axes.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// The element strides of the axes.
    pub fn strides(&self) -> [isize; 4] {
        self.strides
    }

    /// The same elements with two axes exchanged. An axis above 3 leaves the view as it is, and so does any
    /// where the view is packed, paged or scaled.
    pub fn swap_axes(mut self, a: usize, b: usize) -> Self {
        if a < 4 && b < 4 && self.is_strided() && self.scales.is_none() {
            self.shape.swap(a, b);
            self.strides.swap(a, b);
        }
        self
    }

    /// The view with its axes of size 1 stretched to `shape` (stride 0, nothing is copied), or `None` where
    /// another size differs or the new sizes multiply beyond `isize`. Of a packed or paged view only the
    /// heads can be stretched.
    pub fn broadcast(mut self, shape: [usize; 4]) -> Option<Self> {
        count(shape)?;
        for (axis, size) in shape.into_iter().enumerate() {
            match self.shape[axis] {
                n if n == size => {}
                1 if (self.is_strided() || axis == 1) && (self.scales.is_none() || axis < 3) => {
                    (self.shape[axis], self.strides[axis]) = (size, 0);
                    if let Some(scales) = &mut self.scales {
                        scales.strides[axis] = 0;
                    }
                }
                _ => return None,
            }
        }
        Some(self)
    }

    /// Pointer to the start of row `[i0, i1, i2]`.
    ///
    /// The indices must lie inside the shape (checked in debug builds); reading through the pointer is sound
    /// for the feature indices of the view only.
    #[inline(always)]
    pub(crate) fn row(&self, i0: usize, i1: usize, i2: usize) -> *const T {
        debug_assert!(i0 < self.shape[0] && i1 < self.shape[1] && i2 < self.len(i0));
        self.ptr.wrapping_offset(self.tokens.offset(self.strides, i0, i1, i2))
    }

    /// The same with strides that count bytes.
    pub(crate) fn bytes(self) -> View<'a, u8> {
        let Self { ptr, shape, strides, tokens, scales, .. } = self;
        // Wrapping: strides of axes with one element are never used.
        let strides = strides.map(|stride| stride.wrapping_mul(size_of::<T>() as isize));
        View { ptr: ptr.cast(), shape, strides, tokens, scales, _data: PhantomData }
    }
}

impl<T: Copy> View<'_, T> {
    /// The element at `index`, or `None` outside the shape.
    pub fn get(&self, index: [usize; 4]) -> Option<T> {
        if index.iter().zip(&self.shape).any(|(i, n)| i >= n) || index[2] >= self.len(index[0]) {
            return None;
        }
        let ptr = self.row(index[0], index[1], index[2]).wrapping_offset(index[3] as isize * self.strides[3]);
        // SAFETY: the index is inside the shape, and every such element lies inside the slice.
        Some(unsafe { *ptr })
    }
}

impl<'a, T> ViewMut<'a, T> {
    /// A writable view of `data` with the given sizes and element strides; element `[0, 0, 0, 0]` is
    /// `data[offset]`.
    ///
    /// # Errors
    /// As [`View::new`], and [`Error::Overlap`] unless, from the smallest stride to the largest, each one
    /// steps over all the elements of the axes before it.
    pub fn new(
        data: &'a mut [T],
        offset: usize,
        shape: [usize; 4],
        strides: [isize; 4],
    ) -> Result<Self, Error> {
        check_bounds(data.len(), offset, shape, strides)?;
        check_overlap(shape, strides)?;
        Ok(Self {
            ptr: data.as_mut_ptr().wrapping_add(offset),
            shape,
            strides,
            tokens: Tokens::Strided,
            _data: PhantomData,
        })
    }

    /// A writable view of memory that is no one slice: see [`View::from_raw_parts`].
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the sizes multiply beyond `isize`, [`Error::Overlap`] as in [`ViewMut::new`].
    ///
    /// # Safety
    /// For all of `'a`, every element of the view must be valid for writing, hold a value, and be reached
    /// through nothing else.
    pub unsafe fn from_raw_parts(ptr: *mut T, shape: [usize; 4], strides: [isize; 4]) -> Result<Self, Error> {
        count(shape).ok_or(Error::TooLarge { argument: "view", shape })?;
        check_overlap(shape, strides)?;
        Ok(Self { ptr, shape, strides, tokens: Tokens::Strided, _data: PhantomData })
    }

    /// A compact `[B, H, L, D]` tensor, sizes in that order.
    ///
    /// # Errors
    /// As [`View::new`].
    pub fn bhld(data: &'a mut [T], shape: [usize; 4]) -> Result<Self, Error> {
        Self::new(data, 0, shape, row_major(shape)?)
    }

    /// A compact `[B, L, H, D]` tensor, sizes in that order; seen as `[B, H, L, D]`.
    ///
    /// # Errors
    /// As [`View::new`].
    pub fn blhd(data: &'a mut [T], shape: [usize; 4]) -> Result<Self, Error> {
        let mut view = Self::new(data, 0, shape, row_major(shape)?)?;
        view.shape.swap(1, 2);
        view.strides.swap(1, 2);
        Ok(view)
    }

    /// The sizes of the axes.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// The element strides of the axes.
    pub fn strides(&self) -> [isize; 4] {
        self.strides
    }

    /// Copies `from`, which must have the same shape, and the same tokens in every batch entry.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Tokens`] otherwise.
    pub fn copy_from(&mut self, from: View<'_, T>) -> Result<(), Error>
    where
        T: Copy,
    {
        self.expect_like(&from)?;
        let [b, h, _, d] = self.shape;
        for (b, h) in (0..b).flat_map(|b| (0..h).map(move |h| (b, h))) {
            for token in 0..from.len(b) {
                let to = self.row(b, h, token);
                let by_d = self.strides[3];
                let row = from.row(b, h, token);
                // SAFETY: the elements of a row of each view; `self` is borrowed mutably, so they are apart.
                unsafe {
                    if by_d == 1 && from.strides[3] == 1 {
                        core::ptr::copy_nonoverlapping(row, to, d);
                    } else {
                        for c in 0..d as isize {
                            *to.wrapping_offset(c * by_d) = *row.wrapping_offset(c * from.strides[3]);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Refuses a view of another shape or with other tokens.
    pub(crate) fn expect_like<E>(&self, from: &View<'_, E>) -> Result<(), Error> {
        let [batch, _, axis, _] = self.shape;
        if from.shape != self.shape {
            return Err(Error::Shape { argument: "from", got: from.shape, expected: self.shape });
        }
        for b in 0..batch {
            let (got, expected) = (from.len(b), self.tokens.len(b, axis));
            if got != expected {
                return Err(Error::Tokens { argument: "from", b, got, expected });
            }
        }
        Ok(())
    }

    /// Pointer to the start of row `[b, h, token]`, which must be inside the shape.
    pub(crate) fn row(&mut self, b: usize, h: usize, token: usize) -> *mut T {
        self.ptr.wrapping_offset(self.tokens.offset(self.strides, b, h, token))
    }

    /// Starts of the sequences, if it is packed.
    pub(crate) fn starts(&self) -> Option<&'a [usize]> {
        self.tokens.starts()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut T {
        self.ptr
    }
}

/// The number of elements, or `None` beyond `isize`. A size of 0 makes it 0 whatever the others are.
pub(crate) fn count(shape: [usize; 4]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    let n = shape.iter().try_fold(1usize, |n, &s| n.checked_mul(s))?;
    isize::try_from(n).is_ok().then_some(n)
}

fn row_major(shape: [usize; 4]) -> Result<[isize; 4], Error> {
    count(shape).ok_or(Error::TooLarge { argument: "view", shape })?;
    // A compact view with a size of 0 has no elements; its strides only have to be numbers.
    let size = |s: usize| isize::try_from(s.max(1)).unwrap_or(isize::MAX);
    let stride = |axes: &[usize]| axes.iter().fold(1isize, |n, &s| n.saturating_mul(size(s)));
    Ok([stride(&shape[1..]), stride(&shape[2..]), stride(&shape[3..]), 1])
}

fn check_bounds(len: usize, offset: usize, shape: [usize; 4], strides: [isize; 4]) -> Result<(), Error> {
    let elements = count(shape).ok_or(Error::TooLarge { argument: "view", shape })?;
    if elements == 0 {
        return Ok(());
    }
    let (mut low, mut high) = (offset as i128, offset as i128);
    for (size, stride) in shape.into_iter().zip(strides) {
        let reach = (size as i128 - 1) * stride as i128;
        *if reach < 0 { &mut low } else { &mut high } += reach;
    }
    if low < 0 || high >= len as i128 {
        return Err(Error::OutOfBounds { shape, strides, offset, len });
    }
    Ok(())
}

fn check_overlap(shape: [usize; 4], strides: [isize; 4]) -> Result<(), Error> {
    if shape.contains(&0) {
        return Ok(());
    }
    let mut axes: [(usize, usize); 4] = core::array::from_fn(|i| (strides[i].unsigned_abs(), shape[i]));
    axes.sort_unstable();
    let mut reach = 0; // the largest distance between two elements of the axes so far
    for (stride, size) in axes.into_iter().filter(|axis| axis.1 > 1) {
        if stride <= reach {
            return Err(Error::Overlap { shape, strides });
        }
        reach += stride * (size - 1); // inside the slice, so it cannot overflow
    }
    Ok(())
}
