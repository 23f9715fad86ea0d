//! Bias and mask of a block of pairs, transposed to lie beside the scores: `extra[j][i]` is the bias of the
//! pair, -inf where the mask hides it.
//!
//! Neither is ever expanded. Rows that are all the same (a padding mask) are read once for the block; rows
//! with their keys side by side go through registers; other strides element by element.

use core::ops::Range;

use crate::call::Call;
use crate::element::Lanes;
use crate::isa::Isa;
use crate::pack::MAX_ROWS;
use crate::terms::Rows;
use crate::{Element, View};

/// What a block of mask and bias leaves visible.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    Nothing,
    Some,
    All,
}

/// An element of a mask or a bias.
trait Extra: Copy {
    /// Whether the pair is visible.
    fn shows(self) -> bool;
    /// What to add to its score.
    fn value(self) -> f32;
    /// `LANES` values.
    ///
    /// # Safety
    /// `ptr` must be valid for reading `LANES` elements.
    unsafe fn load<I: Isa>(isa: I, ptr: *const Self) -> I::f32s;
}

impl Extra for bool {
    #[inline(always)]
    fn shows(self) -> bool {
        self
    }
    #[inline(always)]
    fn value(self) -> f32 {
        if self { 0.0 } else { f32::NEG_INFINITY }
    }
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, ptr: *const bool) -> I::f32s {
        // SAFETY: the caller's.
        unsafe { isa.load_mask(ptr) }
    }
}

impl Extra for f32 {
    #[inline(always)]
    fn shows(self) -> bool {
        self != f32::NEG_INFINITY
    }
    #[inline(always)]
    fn value(self) -> f32 {
        self
    }
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, ptr: *const f32) -> I::f32s {
        // SAFETY: the caller's.
        unsafe { Lanes::load(isa, ptr) }
    }
}

/// Writes `extra` for `keys` and says what is visible. Where nothing is to be added or hidden, or all is
/// hidden, nothing is written.
///
/// # Safety
/// `extra` must hold `keys.len() * NQ` vectors.
#[inline(always)]
pub(crate) unsafe fn fill<I: Isa, T: Element, const NQ: usize>(
    isa: I,
    call: &Call<'_, T>,
    b: usize,
    rows: &Rows,
    extra: *mut I::f32s,
    keys: Range<usize>,
) -> Seen {
    let width = NQ * I::F32_LANES;
    let mask = match &call.terms.mask {
        Some(mask) => Some(Panel::new(mask, b, rows, &keys, width)),
        None => None,
    };
    let shown = match &mask {
        Some(mask) => mask.seen(isa),
        None => Seen::All,
    };
    if shown == Seen::Nothing || (shown == Seen::All && call.terms.bias.is_none()) {
        return shown;
    }
    // SAFETY: the caller's.
    unsafe {
        match (&call.terms.bias, &mask) {
            (Some(bias), mask) => {
                let bias = Panel::new(bias, b, rows, &keys, width);
                // A look at one pair tells most blocks that hide nothing from those that hide all.
                if !bias.at(0, 0).shows() && bias.seen(isa) == Seen::Nothing {
                    return Seen::Nothing;
                }
                bias.transpose::<I, NQ>(isa, extra);
                match mask {
                    Some(mask) if shown == Seen::Some => mask.hide(extra.cast()),
                    _ => {}
                }
            }
            (None, Some(mask)) => mask.transpose::<I, NQ>(isa, extra),
            (None, None) => {}
        }
    }
    Seen::Some
}

/// The rows of a mask or bias for a block of pairs.
struct Panel<E> {
    /// First key of each row.
    row: [*const E; MAX_ROWS],
    /// Rows that differ: all lanes, or one where they are all the same.
    rows: usize,
    width: usize,
    /// Stride and number of the keys.
    key: isize,
    keys: usize,
}

impl<E: Extra> Panel<E> {
    #[inline(always)]
    fn new(view: &View<'_, E>, b: usize, rows: &Rows, keys: &Range<usize>, width: usize) -> Self {
        let [_, head, token, key] = view.strides();
        let differ = if head == 0 && token == 0 { 1 } else { width };
        let mut row = [core::ptr::null(); MAX_ROWS];
        for (i, row) in row[..differ].iter_mut().enumerate() {
            *row = view.row(b, rows.head[i], rows.token[i]).wrapping_offset(keys.start as isize * key);
        }
        Self { row, rows: differ, width, key, keys: keys.len() }
    }

    /// The element of a lane and a key of the block.
    #[inline(always)]
    fn at(&self, i: usize, j: usize) -> E {
        let row = self.row[if self.rows == 1 { 0 } else { i }];
        debug_assert!(j < self.keys);
        // SAFETY: rows and keys lie inside the shape of the view that this was made from.
        unsafe { *row.wrapping_offset(j as isize * self.key) }
    }

    #[inline(always)]
    fn seen<I: Isa>(&self, isa: I) -> Seen {
        let (mut any, mut all) = (false, true);
        for (i, row) in self.row[..self.rows].iter().enumerate() {
            if self.key == 1 {
                isa.prefetch(row.wrapping_add(self.keys).cast()); // the next block of keys
                // SAFETY: the keys of a row lie side by side inside the view.
                for x in unsafe { core::slice::from_raw_parts(*row, self.keys) } {
                    let shown = x.shows();
                    any |= shown;
                    all &= shown;
                }
            } else {
                for j in 0..self.keys {
                    let shown = self.at(i, j).shows();
                    any |= shown;
                    all &= shown;
                }
            }
        }
        match (any, all) {
            (false, _) => Seen::Nothing,
            (true, false) => Seen::Some,
            (true, true) => Seen::All,
        }
    }

    /// `extra[j][i] = row i, key j`.
    ///
    /// # Safety
    /// `extra` must hold `keys * NQ` vectors.
    #[inline(always)]
    unsafe fn transpose<I: Isa, const NQ: usize>(&self, isa: I, extra: *mut I::f32s) {
        let (lanes, n) = (I::F32_LANES, self.keys);
        // SAFETY: the caller's; and the keys of a row lie side by side where their stride is 1.
        unsafe {
            if self.rows == 1 {
                for j in 0..n {
                    let x = isa.splat_f32s(self.at(0, j).value());
                    for q in 0..NQ {
                        *extra.add(j * NQ + q) = x;
                    }
                }
            } else if self.key == 1 && n >= lanes {
                for q in 0..NQ {
                    let mut j = 0;
                    loop {
                        let mut square = isa.square();
                        for (i, x) in square.as_mut().iter_mut().enumerate() {
                            let ptr = self.row[q * lanes + i].wrapping_add(j);
                            *x = E::load(isa, ptr);
                            isa.prefetch(ptr.wrapping_add(n).cast()); // the next block of keys
                        }
                        for (t, x) in isa.transpose(square).as_ref().iter().enumerate() {
                            *extra.add((j + t) * NQ + q) = *x;
                        }
                        if j + lanes == n {
                            break;
                        }
                        j = (j + lanes).min(n - lanes); // the last square overlaps
                    }
                }
            } else {
                for i in 0..self.width {
                    for j in 0..n {
                        *extra.cast::<f32>().add(j * self.width + i) = self.at(i, j).value();
                    }
                }
            }
        }
    }

    /// Hides pairs of a block that already holds something.
    ///
    /// # Safety
    /// `extra` must hold `keys * width` f32.
    #[inline(always)]
    unsafe fn hide(&self, extra: *mut f32) {
        for i in 0..self.width {
            for j in 0..self.keys {
                if !self.at(i, j).shows() {
                    // SAFETY: the caller's.
                    unsafe { *extra.add(j * self.width + i) = f32::NEG_INFINITY };
                }
            }
        }
    }
}
