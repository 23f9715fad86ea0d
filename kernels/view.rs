//! Views: four sizes and four element strides over a slice. The only place where bounds are checked.
//!
//! Element `[i0, i1, i2, i3]` lies at `data[offset + i0*s0 + i1*s1 + i2*s2 + i3*s3]`. A view that exists has
//! every element inside its slice; a `ViewMut` that exists has no two elements in the same place. All unsafe
//! code in this crate leans on these two sentences.

use core::marker::PhantomData;
use core::ops::Range;

use crate::Error;

/// Where the tokens of a batch entry lie.
#[derive(Debug, Clone, Copy)]
enum Tokens<'a> {
    /// By the strides.
    Strided,
    /// Batch entry `b` has the tokens `starts[b]..starts[b + 1]` of the one batch entry there is.
    Packed { starts: &'a [usize] },
    /// Batch entry `b` has `lens[b]` tokens: `size` in each of the batch entries `table[b * width..]`.
    Paged { table: &'a [u32], width: usize, size: usize, lens: &'a [usize] },
    /// Batch entry `b` has `lens[b]` tokens: the first `keep`, then those of a ring from `firsts[b]` on.
    Ring { keep: usize, firsts: &'a [usize], lens: &'a [usize], axis: usize },
}

impl Tokens<'_> {
    /// Batch entry and token, as the strides count them.
    #[inline(always)]
    fn find(&self, b: usize, token: usize) -> [usize; 2] {
        match *self {
            Tokens::Strided => [b, token],
            Tokens::Packed { starts } => [0, starts[b] + token],
            Tokens::Paged { table, width, size, .. } => {
                [table[b * width + token / size] as usize, token % size]
            }
            Tokens::Ring { keep, .. } if token < keep => [b, token],
            Tokens::Ring { keep, firsts, axis, .. } => {
                let place = firsts[b] + token;
                [b, if place < axis { place } else { place - axis + keep }]
            }
        }
    }

    /// Tokens of a batch entry, of an axis of `axis` tokens.
    #[inline(always)]
    fn len(&self, b: usize, axis: usize) -> usize {
        match *self {
            Tokens::Strided => axis,
            Tokens::Packed { starts } => starts[b + 1] - starts[b],
            Tokens::Paged { lens, .. } | Tokens::Ring { lens, .. } => lens[b],
        }
    }
}

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
            _data: PhantomData,
        })
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

    /// Sequences of different lengths, side by side without padding: batch entry `b` of the result has the
    /// tokens `starts[b]..starts[b + 1]` of this view, which must have one batch entry. The token axis of the
    /// result is as long as the longest sequence.
    ///
    /// ```
    /// use headwise_kernels::View;
    /// let data = [1.0, 2.0, 3.0, 4.0, 5.0]; // 5 tokens, 1 head of 1: sequences of 2 and 3 tokens
    /// let ragged = View::blhd(&data, [1, 5, 1, 1])?.packed(&[0, 2, 5])?;
    /// assert_eq!(ragged.shape(), [2, 1, 3, 1]);
    /// assert_eq!([ragged.len(0), ragged.len(1)], [2, 3]);
    /// assert_eq!(ragged.get([1, 0, 0, 0]), Some(3.0));
    /// # Ok::<(), headwise_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Packed`] if the view has several batch entries or is packed or paged already, or unless
    /// `starts` never falls and ends inside the token axis.
    pub fn packed(mut self, starts: &'a [usize]) -> Result<Self, Error> {
        self.shape = packed_shape(self.shape, &self.tokens, starts)?;
        self.tokens = Tokens::Packed { starts };
        Ok(self)
    }

    /// A paged cache: this view is the pool, its batch entries are pages of as many tokens as its token axis
    /// has. Batch entry `b` of the result has `lens[b]` tokens, in the pages that row `b` of `table` names
    /// (compact, `lens.len()` rows); what the table holds behind them is not looked at. Pages may be shared.
    ///
    /// ```
    /// use headwise_kernels::View;
    /// let pool = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]; // 3 pages of 2 tokens, 1 head of 1
    /// let cache = View::bhld(&pool, [3, 1, 2, 1])?.paged(&[2, 0], &[3])?;
    /// assert_eq!(cache.shape(), [1, 1, 4, 1]);
    /// assert_eq!([0, 1, 2, 3].map(|j| cache.get([0, 0, j, 0])), [Some(5.0), Some(6.0), Some(1.0), None]);
    /// # Ok::<(), headwise_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Paged`] if the view is packed or paged already, has pages of no tokens, or if the table has
    /// no whole rows; [`Error::Page`] if it names a page that is not there; [`Error::BeyondAxis`] if a length
    /// needs more pages than the table has in a row.
    pub fn paged(mut self, table: &'a [u32], lens: &'a [usize]) -> Result<Self, Error> {
        let ([pages, h, size, d], rows) = (self.shape, lens.len());
        let whole = if rows == 0 { table.is_empty() } else { table.len().is_multiple_of(rows) };
        if size == 0 || !whole || !matches!(self.tokens, Tokens::Strided) {
            return Err(Error::Paged { pool: self.shape, table: table.len(), rows });
        }
        let width = table.len().checked_div(rows).unwrap_or(0);
        let shape = [rows, h, width.saturating_mul(size), d];
        count(shape).ok_or(Error::TooLarge { argument: "paged", shape })?;
        for (index, &got) in lens.iter().enumerate() {
            if got > shape[2] {
                return Err(Error::BeyondAxis { argument: "lens", index, got, axis: shape[2] });
            }
            let used = index * width..index * width + got.div_ceil(size);
            if let Some(at) = used.clone().find(|&at| table[at] as usize >= pages) {
                return Err(Error::Page { index: at, got: table[at] as usize, pages });
            }
        }
        self.shape = shape;
        self.tokens = Tokens::Paged { table, width, size, lens };
        Ok(self)
    }

    /// A rolling cache: batch entry `b` of the result has `lens[b]` tokens, the first `keep` of them in their
    /// places, those behind in a ring of the places from `keep` on, which starts at place `keep + firsts[b]`.
    ///
    /// ```
    /// use headwise_kernels::View;
    /// let data = [1.0, 6.0, 7.0, 4.0, 5.0]; // tokens 2 and 3 have made room for 6 and 7; 1 is kept
    /// let cache = View::bhld(&data, [1, 1, 5, 1])?.rolling(1, &[2], &[5])?;
    /// let tokens = [0, 1, 2, 3, 4].map(|j| cache.get([0, 0, j, 0]).unwrap());
    /// assert_eq!(tokens, [1.0, 4.0, 5.0, 6.0, 7.0]);
    /// # Ok::<(), headwise_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Packed`] if the view is packed, paged or rolling already; [`Error::Length`] unless there is one
    /// start and one length for each batch entry; [`Error::BeyondAxis`] if a start lies outside the ring or a
    /// length beyond the axis.
    pub fn rolling(mut self, keep: usize, firsts: &'a [usize], lens: &'a [usize]) -> Result<Self, Error> {
        let [b, _, axis, _] = self.shape;
        if !self.is_strided() {
            return Err(Error::Packed { shape: self.shape, end: None });
        }
        for (argument, got) in [("firsts", firsts.len()), ("lens", lens.len())] {
            if got != b {
                return Err(Error::Length { argument, got, expected: b });
            }
        }
        let ring = axis.saturating_sub(keep);
        for index in 0..b {
            if firsts[index] > 0 && firsts[index] >= ring {
                return Err(Error::BeyondAxis { argument: "firsts", index, got: firsts[index], axis: ring });
            }
            if lens[index] > axis {
                return Err(Error::BeyondAxis { argument: "lens", index, got: lens[index], axis });
            }
        }
        self.tokens = Tokens::Ring { keep, firsts, lens, axis };
        Ok(self)
    }

    /// One batch entry by itself, with the tokens that it has; `None` where there is no such entry, or where
    /// its tokens do not lie one stride apart (paged, rolling).
    pub fn entry(mut self, b: usize) -> Option<Self> {
        if b >= self.shape[0] || !matches!(self.tokens, Tokens::Strided | Tokens::Packed { .. }) {
            return None;
        }
        let ([place, first], len) = (self.tokens.find(b, 0), self.len(b));
        let offset = place as isize * self.strides[0] + first as isize * self.strides[2];
        self.ptr = self.ptr.wrapping_offset(offset);
        (self.shape[0], self.shape[2], self.tokens) = (1, len, Tokens::Strided);
        Some(self)
    }

    /// The tokens `range` of every batch entry; `None` where they reach beyond the axis, or where the view is
    /// packed, paged or rolling.
    pub fn tokens(mut self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.shape[2] || !self.is_strided() {
            return None;
        }
        self.ptr = self.ptr.wrapping_offset(range.start as isize * self.strides[2]);
        self.shape[2] = range.len();
        Some(self)
    }

    /// The first `n` features, or all if there are fewer.
    pub fn first_features(mut self, n: usize) -> Self {
        self.shape[3] = self.shape[3].min(n);
        self
    }

    /// The number of tokens of batch entry `b`: of a packed or paged view its own, else the size of the axis.
    /// `b` must lie inside its axis.
    pub fn len(&self, b: usize) -> usize {
        self.tokens.len(b, self.shape[2])
    }

    /// Whether any `tokens` tokens from a multiple of it on lie one stride apart.
    #[inline(always)]
    pub(crate) fn has_runs_of(&self, tokens: usize) -> bool {
        match self.tokens {
            Tokens::Strided | Tokens::Packed { .. } => true,
            Tokens::Paged { size, .. } => size.is_multiple_of(tokens),
            Tokens::Ring { keep, axis, .. } => keep >= axis,
        }
    }

    /// Tokens of batch entry `b` from `token` on that lie one stride apart.
    #[inline(always)]
    pub(crate) fn run(&self, b: usize, token: usize) -> usize {
        match self.tokens {
            Tokens::Strided | Tokens::Packed { .. } => usize::MAX,
            Tokens::Paged { size, .. } => size - token % size,
            Tokens::Ring { keep, .. } if token < keep => keep - token,
            Tokens::Ring { axis, .. } => axis - self.tokens.find(b, token)[1],
        }
    }

    /// Starts of the sequences of a packed view.
    pub(crate) fn starts(&self) -> Option<&'a [usize]> {
        match self.tokens {
            Tokens::Packed { starts } => Some(starts),
            _ => None,
        }
    }

    pub(crate) fn is_strided(&self) -> bool {
        matches!(self.tokens, Tokens::Strided)
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
    /// where the view is packed or paged.
    pub fn swap_axes(mut self, a: usize, b: usize) -> Self {
        if a < 4 && b < 4 && self.is_strided() {
            self.shape.swap(a, b);
            self.strides.swap(a, b);
        }
        self
    }

    /// The view with its axes of size 1 stretched to `shape` (stride 0, nothing is copied), or `None` where
    /// another size differs or the new sizes multiply beyond `isize`. Of a packed or paged view only the heads
    /// can be stretched.
    pub fn broadcast(mut self, shape: [usize; 4]) -> Option<Self> {
        count(shape)?;
        for (axis, size) in shape.into_iter().enumerate() {
            match self.shape[axis] {
                n if n == size => {}
                1 if self.is_strided() || axis == 1 => (self.shape[axis], self.strides[axis]) = (size, 0),
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
        let [i0, i2] = self.tokens.find(i0, i2);
        self.ptr.wrapping_offset(
            i0 as isize * self.strides[0] + i1 as isize * self.strides[1] + i2 as isize * self.strides[2],
        )
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
        let [b, h, axis, d] = self.shape;
        if from.shape != self.shape {
            return Err(Error::Shape { argument: "from", got: from.shape, expected: self.shape });
        }
        for b in 0..b {
            let (got, expected) = (from.len(b), self.tokens.len(b, axis));
            if got != expected {
                return Err(Error::Tokens { argument: "from", b, got, expected });
            }
        }
        for (b, h) in (0..b).flat_map(|b| (0..h).map(move |h| (b, h))) {
            for token in 0..from.len(b) {
                let [place, at] = self.tokens.find(b, token);
                let [by_b, by_h, by_token, by_d] = self.strides;
                let to = self
                    .ptr
                    .wrapping_offset(place as isize * by_b + h as isize * by_h + at as isize * by_token);
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

    /// Sequences of different lengths, side by side: see [`View::packed`]. What lies outside them is not
    /// written.
    ///
    /// # Errors
    /// As [`View::packed`].
    pub fn packed(mut self, starts: &'a [usize]) -> Result<Self, Error> {
        self.shape = packed_shape(self.shape, &self.tokens, starts)?;
        self.tokens = Tokens::Packed { starts };
        Ok(self)
    }

    /// Starts of the sequences, if it is packed.
    pub(crate) fn starts(&self) -> Option<&'a [usize]> {
        match self.tokens {
            Tokens::Packed { starts } => Some(starts),
            _ => None,
        }
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

/// The shape of a view once it is packed.
fn packed_shape(shape: [usize; 4], tokens: &Tokens<'_>, starts: &[usize]) -> Result<[usize; 4], Error> {
    let [b, h, total, d] = shape;
    let rising = starts.is_sorted() && starts.last().is_some_and(|&end| end <= total);
    if b != 1 || !rising || !matches!(tokens, Tokens::Strided) {
        return Err(Error::Packed { shape, end: starts.last().copied() });
    }
    let longest = starts.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
    let shape = [starts.len() - 1, h, longest, d];
    count(shape).ok_or(Error::TooLarge { argument: "packed", shape })?;
    Ok(shape)
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
