//! Bias and mask of a block of pairs, turned to lie beside the transposed scores.
//!
//! Neither is ever expanded. The mask becomes a bit for each pair, 64 by 64 of them transposed as 64 words.
//! The bias goes through registers, on its way to the scores. Rows that are all the same (a padding mask) are
//! read once.

use core::ops::Range;

use crate::View;
use crate::call::Call;
use crate::element::Load;
use crate::isa::Isa;
use crate::pack::MAX_ROWS;
use crate::prefill::KEYS;
use crate::terms::Rows;
use crate::tile::Lines;

/// What a block of mask and bias leaves visible.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    Nothing,
    Some,
    All,
}

/// Mask and bias of a block of pairs.
pub(crate) struct Added {
    /// Word `j` has bit `i` set where row `i` sees key `j`; `None` where the mask hides nothing.
    pub mask: Option<[u64; 64]>,
    flags: Option<Panel<bool>>,
    bias: Option<Panel<f32>>,
    /// `All`: nothing to add or hide.
    pub seen: Seen,
}

impl Added {
    /// Looks at what the block leaves visible: at most 64 keys and `width` rows.
    #[inline(always)]
    pub fn new<I: Isa>(
        isa: I,
        call: &Call<'_>,
        b: usize,
        rows: &Rows<'_>,
        keys: &Range<usize>,
        width: usize,
    ) -> Self {
        let (mut mask, mut flags, mut bias, mut seen) = (None, None, None, Seen::All);
        if let Some(view) = &call.terms.mask {
            let mut words = [0; 64];
            let panel = Panel::new(view, b, rows, keys, width);
            seen = panel.bits(isa, &mut words);
            flags = Some(panel);
            if seen == Seen::Some {
                transpose_bits(&mut words);
                mask = Some(words);
            }
        }
        if let (Some(view), true) = (&call.terms.bias, seen != Seen::Nothing) {
            let panel = Panel::new(view, b, rows, keys, width);
            // A look at one pair tells most blocks that hide nothing from those that hide all.
            let hidden = panel.at(0, 0) == f32::NEG_INFINITY && panel.hides_all();
            seen = if hidden { Seen::Nothing } else { Seen::Some };
            bias = Some(panel);
        }
        Self { mask, flags, bias, seen }
    }

    /// What of the bias, or the mask, of the keys that come next is to be asked for during the scores, 0, or the
    /// values, 1.
    #[inline(always)]
    pub fn ahead(&self, during: usize) -> Lines {
        match self.bias.as_ref().map(|bias| bias.ahead(during)) {
            Some(lines) if lines.count > 0 => lines,
            _ => self.flags.as_ref().map_or(Lines::NONE, |flags| flags.ahead(during)),
        }
    }

    /// Adds the bias, times the unit, to the scores `st` of `n` keys (or, without, only hides), and
    /// makes them exactly -inf where the bias is -inf or the mask's bit is 0, whatever they were. Returns the
    /// largest score of each lane.
    ///
    /// # Safety
    /// `st` must hold `n * NQ` vectors.
    #[inline(always)]
    pub unsafe fn apply<I: Isa, const NQ: usize>(
        &self,
        isa: I,
        st: *mut I::f32s,
        n: usize,
        unit: Option<f32>,
    ) -> [I::f32s; NQ] {
        let (lanes, minus_inf) = (I::F32_LANES, isa.splat_f32s(f32::NEG_INFINITY));
        let mut max = [minus_inf; NQ];
        // SAFETY: the caller's.
        unsafe {
            let Some(bias) = &self.bias else {
                for j in 0..n {
                    for (q, max) in max.iter_mut().enumerate() {
                        let st = &mut *st.add(j * NQ + q);
                        *st = self.hide(isa, *st, j, q);
                        *max = isa.max_f32s(*st, *max);
                    }
                }
                return max;
            };
            for (q, max) in max.iter_mut().enumerate() {
                let (mut largest, mut other) = (minus_inf, minus_inf); // in registers
                let mut done = 0;
                if let (None, Some(unit), true) = (&self.mask, unit, bias.is_dense()) {
                    // Whole squares, which stay in registers from their loads to the scores: a quarter less
                    // than through memory.
                    let unit = isa.splat_f32s(unit);
                    while done + lanes <= n {
                        for (j, bias) in bias.whole_square(isa, q, done).as_ref().iter().enumerate() {
                            let st = &mut *st.add((done + j) * NQ + q);
                            let x = isa.mul_add_e_f32s(*bias, unit, *st);
                            *st = isa.hide_like(x, *bias);
                            largest = isa.max_f32s(*st, largest);
                            core::mem::swap(&mut largest, &mut other); // two chains
                        }
                        done += lanes;
                    }
                }
                for start in (done..n).step_by(lanes) {
                    let (first, square) = bias.square(isa, q, start);
                    for j in start..n.min(start + lanes) {
                        let (st, bias) = (&mut *st.add(j * NQ + q), square.as_ref()[j - first]);
                        let x = match unit {
                            Some(unit) => isa.mul_add_e_f32s(bias, isa.splat_f32s(unit), *st),
                            None => *st,
                        };
                        *st = self.hide(isa, isa.hide_like(x, bias), j, q);
                        largest = isa.max_f32s(*st, largest);
                    }
                }
                *max = isa.max_f32s(largest, other);
            }
        }
        max
    }

    /// The scores `x` of key `j` for the rows of vector `q`, as the mask leaves them.
    #[inline(always)]
    fn hide<I: Isa>(&self, isa: I, x: I::f32s, j: usize, q: usize) -> I::f32s {
        match &self.mask {
            Some(mask) => isa.hide(x, mask[j] >> (q * I::F32_LANES)),
            None => x,
        }
    }
}

/// Exchanges rows and columns of 64 x 64 bits (Warren, "Hacker's Delight", section 7-3).
#[inline(always)]
fn transpose_bits(words: &mut [u64; 64]) {
    let (mut size, mut low) = (32, u64::MAX >> 32);
    while size > 0 {
        for half in words.chunks_exact_mut(2 * size) {
            let (upper, lower) = half.split_at_mut(size);
            for (a, b) in upper.iter_mut().zip(lower) {
                let swap = (*a >> size ^ *b) & low;
                *a ^= swap << size;
                *b ^= swap;
            }
        }
        size /= 2;
        low ^= low << size;
    }
}

/// The rows of a mask or bias for a block of pairs.
struct Panel<E> {
    /// First key of each row.
    row: [*const E; MAX_ROWS],
    /// Rows that differ: all of them, or one where they are all the same.
    rows: usize,
    width: usize,
    /// Heads of a token, and how many of them differ: all or one.
    group: usize,
    heads: usize,
    /// Bytes from token to token.
    token: isize,
    /// Stride and number of the keys.
    key: isize,
    keys: usize,
    /// The first key.
    start: usize,
}

impl<E: Copy> Panel<E> {
    #[inline(always)]
    fn new(view: &View<'_, E>, b: usize, rows: &Rows<'_>, keys: &Range<usize>, width: usize) -> Self {
        let [_, head, token, key] = view.strides();
        let differ = if head == 0 && token == 0 { 1 } else { width };
        let mut row = rows.pointers(view, b, differ);
        for row in &mut row[..differ] {
            *row = row.wrapping_offset(keys.start as isize * key);
        }
        let group = rows.heads.len();
        let (heads, token) = (if head == 0 { 1 } else { group }, token.wrapping_mul(size_of::<E>() as isize));
        Self { row, rows: differ, width, group, heads, token, key, keys: keys.len(), start: keys.start }
    }

    /// With each of `RUN` blocks of keys in turn, a part of the rows, but `RUN` blocks of them: long runs
    /// of memory come faster than single lines of many rows (2 or 8 blocks: 1 to 2 % slower). With 2048 keys,
    /// D 64, AVX-512, a bias costs 8 % where it is in the nearest cache, 12 % in the second, and 19 % beyond: a
    /// line from there takes some 5 cycles, however early it is asked for.
    #[inline(always)]
    fn ahead(&self, during: usize) -> Lines {
        const RUN: usize = 4;
        let tokens = self.width / self.group;
        if self.rows == 1 || self.key != 1 || tokens == 0 {
            return Lines::NONE;
        }
        let next = (RUN - self.start / KEYS % RUN) * KEYS - self.start % KEYS;
        let bytes = RUN * KEYS * size_of::<E>();
        // Head by head, as the tokens of one lie evenly; a part does not go on to the next.
        let (rows, part) = (self.heads * tokens, self.start / KEYS % RUN * 2 + during);
        let (from, to) = (part * rows / (2 * RUN), (part + 1) * rows / (2 * RUN));
        let (head, token) = (from / tokens, from % tokens);
        let ptr = self.row[token * self.group + head].wrapping_add(next).cast();
        Lines { ptr, row: self.token, bytes, count: (to - from).min(tokens - token) }
    }

    /// The element of a row and a key of the block.
    #[inline(always)]
    fn at(&self, i: usize, j: usize) -> E {
        let row = self.row[if self.rows == 1 { 0 } else { i }];
        debug_assert!(j < self.keys);
        // SAFETY: rows and keys lie inside the shape of the view that this was made from.
        unsafe { *row.wrapping_offset(j as isize * self.key) }
    }
}

impl Panel<bool> {
    /// Sets bit `j` of word `i` where row `i` sees key `j`.
    #[inline(always)]
    fn bits<I: Isa>(&self, isa: I, words: &mut [u64; 64]) -> Seen {
        let (mut any, mut all) = (0, u64::MAX);
        for (i, word) in words[..self.rows].iter_mut().enumerate() {
            // SAFETY: the keys of a row lie inside the view, one stride apart.
            *word = unsafe { bits(isa, self.row[i], self.key, self.keys) };
            any |= *word;
            all &= *word;
        }
        if self.rows == 1 {
            *words = [words[0]; 64];
        }
        match (any == 0, all == u64::MAX >> (64 - self.keys)) {
            (true, _) => Seen::Nothing,
            (false, false) => Seen::Some,
            (false, true) => Seen::All,
        }
    }
}

/// Bit `j` of the result is element `j` of `n <= 64`, which lie `stride` apart.
///
/// # Safety
/// They must be readable.
#[inline(always)]
pub(crate) unsafe fn bits<I: Isa>(isa: I, row: *const bool, stride: isize, n: usize) -> u64 {
    // SAFETY: the caller's.
    unsafe {
        if stride == 1 {
            return isa.bits(row, n);
        }
        (0..n).fold(0, |bits, j| bits | u64::from(*row.wrapping_offset(j as isize * stride)) << j)
    }
}

impl Panel<f32> {
    #[inline(always)]
    fn hides_all(&self) -> bool {
        (0..self.rows).all(|i| (0..self.keys).all(|j| self.at(i, j) == f32::NEG_INFINITY))
    }

    /// Whether rows differ and their keys lie side by side.
    #[inline(always)]
    fn is_dense(&self) -> bool {
        self.rows > 1 && self.key == 1
    }

    /// The square of the keys from `first` on, all of which there must be; for rows that are dense.
    #[inline(always)]
    fn whole_square<I: Isa>(&self, isa: I, q: usize, first: usize) -> I::Square {
        debug_assert!(self.is_dense() && first + I::F32_LANES <= self.keys);
        let mut square = isa.square();
        for (x, row) in square.as_mut().iter_mut().zip(&self.row[q * I::F32_LANES..]) {
            // SAFETY: the keys of a row lie side by side, and `first + lanes` of them are there.
            *x = unsafe { Load::load(isa, row.wrapping_add(first)) };
        }
        isa.transpose(square)
    }

    /// A square of the bias, transposed: vector `j` holds, for the rows of vector `q`, key `first + j`.
    /// Returns `first`, and has all keys from `start` on that there are: where too few are left for a square
    /// it begins before.
    #[inline(always)]
    fn square<I: Isa>(&self, isa: I, q: usize, start: usize) -> (usize, I::Square) {
        let (lanes, n) = (I::F32_LANES, self.keys);
        let mut square = isa.square();
        if self.rows == 1 {
            for (j, x) in (start..n).zip(square.as_mut()) {
                *x = isa.splat_f32s(self.at(0, j));
            }
            return (start, square);
        }
        if self.is_dense() && n >= lanes {
            let first = start.min(n - lanes);
            return (first, self.whole_square(isa, q, first));
        }
        let flat = square.as_mut().as_mut_ptr().cast::<f32>();
        for (t, j) in (start..n.min(start + lanes)).enumerate() {
            for i in 0..lanes {
                // SAFETY: a square is `lanes * lanes` f32.
                unsafe { *flat.add(t * lanes + i) = self.at(q * lanes + i, j) };
            }
        }
        (start, square)
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn bits_are_transposed() {
        let word = |i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(i as u32);
        let words: [u64; 64] = core::array::from_fn(|i| word(i as u64 + 1));
        let mut turned = words;
        super::transpose_bits(&mut turned);
        for (i, word) in words.iter().enumerate() {
            for (j, column) in turned.iter().enumerate() {
                assert_eq!(word >> j & 1, column >> i & 1);
            }
        }
    }
}
