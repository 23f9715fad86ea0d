//! Views whose tokens do not lie by strides alone: packed sequences, paged and rolling caches.

use core::ops::Range;

use super::{View, ViewMut, count};
use crate::Error;

/// Where the tokens of a batch entry lie.
#[derive(Debug, Clone, Copy)]
pub(super) enum Tokens<'a> {
    /// By the strides.
    Strided,
    /// Batch entry `b` has the tokens `starts[b]..starts[b + 1]` of the one batch entry there is.
    Packed { starts: &'a [usize] },
    /// Batch entry `b` has `lens[b]` tokens: `size` in each of the batch entries `table[b * width..]`.
    Paged { table: &'a [u32], width: usize, size: usize, lens: &'a [usize] },
    /// Batch entry `b` has `lens[b]` tokens: the first `keep`, then those of a ring from `firsts[b]` on.
    Ring { keep: usize, firsts: &'a [usize], lens: &'a [usize], axis: usize },
}

impl<'a> Tokens<'a> {
    /// Batch entry and token, as the strides count them.
    #[inline(always)]
    pub fn find(&self, b: usize, token: usize) -> [usize; 2] {
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

    /// Where row `[b, h, token]` starts, from the first element on.
    #[inline(always)]
    pub fn offset(&self, strides: [isize; 4], b: usize, h: usize, token: usize) -> isize {
        let [b, token] = self.find(b, token);
        b as isize * strides[0] + h as isize * strides[1] + token as isize * strides[2]
    }

    /// Of packed sequences, where they start.
    pub fn starts(&self) -> Option<&'a [usize]> {
        match *self {
            Tokens::Packed { starts } => Some(starts),
            _ => None,
        }
    }

    /// Tokens of a batch entry, of an axis of `axis` tokens.
    #[inline(always)]
    pub fn len(&self, b: usize, axis: usize) -> usize {
        match *self {
            Tokens::Strided => axis,
            Tokens::Packed { starts } => starts[b + 1] - starts[b],
            Tokens::Paged { lens, .. } | Tokens::Ring { lens, .. } => lens[b],
        }
    }
}

impl<'a, T> View<'a, T> {
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
        if size == 0 || !whole || !self.is_strided() {
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
    /// [`Error::Packed`] if the view is packed, paged or rolling already; [`Error::Length`] unless there is
    /// one start and one length for each batch entry; [`Error::BeyondAxis`] if a start lies outside the ring
    /// or a length beyond the axis.
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
        let (offset, len) = (self.tokens.offset(self.strides, b, 0, 0), self.len(b));
        self.ptr = self.ptr.wrapping_offset(offset);
        if let Some(scales) = &mut self.scales {
            scales.skip(self.tokens.offset(scales.strides, b, 0, 0));
        }
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
        if let Some(scales) = &mut self.scales {
            scales.skip(range.start as isize * scales.strides[2]);
        }
        self.shape[2] = range.len();
        Some(self)
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
        self.tokens.starts()
    }

    pub(crate) fn is_strided(&self) -> bool {
        matches!(self.tokens, Tokens::Strided)
    }
}

impl<'a, T> ViewMut<'a, T> {
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
