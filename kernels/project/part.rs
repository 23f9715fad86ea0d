//! Some rows times some inputs of one panel: register tiles one below the other, and what is asked for
//! meanwhile.

use super::activate::{Activation, activate};
use super::weights::PANEL;
use crate::element::Element;
use crate::isa::Isa;

/// Steps of a tile after which to ask for more weights and for the next tile's rows: without it 512 rows of
/// 2048 x 2048 reach 69 % of the peak, with it 83 %, and 8 rows 68 % and 88 % of the read rate.
const PACE: usize = 4;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Asks for the weights that come next in memory, for the second-level cache, evenly while all tiles of some
/// rows run over those before: what comes from memory comes while there is something to compute.
struct Ahead {
    at: *const u8,
    left: usize,
    pace: usize,
}

impl Ahead {
    /// The share in the `lines` at `next` of tile `tile` of `tiles`, with `steps` steps each.
    #[inline(always)]
    fn new(next: *const u8, lines: usize, steps: usize, [tile, tiles]: [usize; 2]) -> Self {
        let (start, end) = (tile * lines / tiles, (tile + 1) * lines / tiles);
        let left = end - start;
        Self { at: next.wrapping_add(start * LINE), left, pace: left.div_ceil((steps / PACE).max(1)) }
    }

    #[inline(always)]
    fn step<I: Isa>(&mut self, isa: I) {
        for _ in 0..self.pace.min(self.left) {
            isa.prefetch(self.at);
            self.at = self.at.wrapping_add(LINE);
            self.left -= 1;
        }
    }
}

/// Some rows times some inputs of one panel.
#[derive(Clone, Copy)]
pub(super) struct Part<I> {
    pub isa: I,
    pub steps: usize,
    pub x: *const f32,
    pub x_row: usize,
    /// The weights that come next, and their bytes.
    pub behind: *const u8,
    pub bytes: usize,
    pub out: *mut f32,
    pub out_row: usize,
    pub columns: usize,
    pub bias: Option<*const f32>,
    /// What the sums are added to, row for row as the output: it may be the output.
    pub base: Option<*const f32>,
    pub activation: Option<Activation>,
}

impl<I: Isa> Part<I> {
    /// All rows, times the weights at `w`. Cuts them in tiles of nearly the same height: low ones wait for
    /// their own sums.
    ///
    /// # Safety
    /// As [`Part::tile`] for all rows.
    #[inline(always)]
    pub unsafe fn rows<W: Element, const NQ: usize, const MR: usize>(self, w: *const W, rows: usize) {
        const { assert!(MR <= 6, "the heights below") };
        let tiles = rows.div_ceil(MR);
        for tile in 0..tiles {
            let (start, end) = (tile * rows / tiles, (tile + 1) * rows / tiles);
            let part = Self {
                x: self.x.wrapping_add(start * self.x_row),
                out: self.out.wrapping_add(start * self.out_row),
                base: self.base.map(|base| base.wrapping_add(start * self.out_row)),
                ..self
            };
            let mut ahead = Ahead::new(self.behind, self.bytes / LINE, self.steps, [tile, tiles]);
            // SAFETY: the caller's.
            unsafe {
                match end - start {
                    1 if NQ * I::F32_LANES < PANEL => part.tile::<W, 8, 1>(w, &mut ahead),
                    1 => part.tile::<W, NQ, 1>(w, &mut ahead),
                    2 => part.tile::<W, NQ, 2>(w, &mut ahead),
                    3 => part.tile::<W, NQ, 3>(w, &mut ahead),
                    4 => part.tile::<W, NQ, 4>(w, &mut ahead),
                    5 => part.tile::<W, NQ, 5>(w, &mut ahead),
                    _ => part.tile::<W, NQ, 6>(w, &mut ahead),
                }
            }
        }
    }

    /// `M` rows times the panel, `NQ` vectors at a time.
    ///
    /// # Safety
    /// `M` rows of `steps` elements at `x`, `steps * 64` at `w`, `M` rows of `columns` at `out` and at
    /// `base`, and one at `bias`.
    #[inline(always)]
    unsafe fn tile<W: Element, const NQ: usize, const M: usize>(&self, w: *const W, ahead: &mut Ahead) {
        let wide = NQ * I::F32_LANES;
        for column in (0..self.columns).step_by(wide) {
            // SAFETY: the caller's.
            unsafe {
                let mut acc = self.product::<W, NQ, M>(w.wrapping_add(column), ahead);
                for (m, acc) in acc.iter_mut().enumerate() {
                    self.finish(m, column, acc);
                }
            }
        }
    }

    /// The register tile.
    ///
    /// # Safety
    /// As [`Part::tile`].
    #[inline(always)]
    unsafe fn product<W: Element, const NQ: usize, const M: usize>(
        &self,
        w: *const W,
        ahead: &mut Ahead,
    ) -> [[I::f32s; NQ]; M] {
        let isa = self.isa;
        let mut acc = [[isa.splat_f32s(0.0); NQ]; M];
        let mut at = (self.x, w);
        let next = self.x.wrapping_add(M * self.x_row);
        for block in 0..self.steps / PACE {
            ahead.step(isa);
            for m in (block % PACE * 2..M).take(2) {
                isa.prefetch_near(next.wrapping_add(m * self.x_row + block * PACE).cast());
            }
            for _ in 0..PACE {
                // SAFETY: the caller's.
                unsafe { self.step(&mut at, &mut acc) };
            }
        }
        for _ in 0..self.steps % PACE {
            // SAFETY: the caller's.
            unsafe { self.step(&mut at, &mut acc) };
        }
        acc
    }

    /// Adds the products of one element of each row at `x` and the vectors at `w`, and goes on to the next.
    /// (No closure: one that is called in two places need not be inlined.)
    ///
    /// # Safety
    /// They must be readable.
    #[inline(always)]
    unsafe fn step<W: Element, const NQ: usize, const M: usize>(
        &self,
        (x, w): &mut (*const f32, *const W),
        acc: &mut [[I::f32s; NQ]; M],
    ) {
        let isa = self.isa;
        // SAFETY: the caller's.
        unsafe {
            let mut vectors = [isa.splat_f32s(0.0); NQ];
            for (n, vector) in vectors.iter_mut().enumerate() {
                *vector = W::load(isa, w.wrapping_add(n * I::F32_LANES));
            }
            for (m, acc) in acc.iter_mut().enumerate() {
                let scalar = isa.splat_f32s(*x.wrapping_add(m * self.x_row));
                for (acc, vector) in acc.iter_mut().zip(vectors) {
                    *acc = isa.mul_add_e_f32s(scalar, vector, *acc);
                }
            }
        }
        *x = x.wrapping_add(1);
        *w = w.wrapping_add(PANEL);
    }

    /// Adds what the sums are added to, applies the activation and writes.
    ///
    /// # Safety
    /// As [`Part::tile`].
    #[inline(always)]
    unsafe fn finish<const NQ: usize>(&self, m: usize, column: usize, acc: &mut [I::f32s; NQ]) {
        let (isa, lanes) = (self.isa, I::F32_LANES);
        let at = m * self.out_row + column;
        let whole = column + NQ * lanes <= self.columns;
        for (n, acc) in acc.iter_mut().enumerate() {
            let column = column + n * lanes;
            let some = if whole { lanes } else { lanes.min(self.columns.saturating_sub(column)) };
            let mut y = *acc;
            // SAFETY: the caller's; `some` columns from `column` on lie inside the row.
            unsafe {
                if let Some(bias) = self.bias {
                    y = isa.add_f32s(y, load(isa, bias.wrapping_add(column), some));
                }
                if let Some(base) = self.base {
                    y = isa.add_f32s(y, load(isa, base.wrapping_add(at + n * lanes), some));
                }
                if let Some(activation) = self.activation {
                    y = activate(isa, activation, y);
                }
                store(isa, self.out.wrapping_add(at + n * lanes), some, y);
            }
        }
    }
}

/// The first `some` lanes from memory, 0 in the others.
///
/// # Safety
/// `some` elements must be readable.
#[inline(always)]
unsafe fn load<I: Isa>(isa: I, ptr: *const f32, some: usize) -> I::f32s {
    // SAFETY: the caller's.
    unsafe {
        if some == I::F32_LANES {
            return ptr.cast::<I::f32s>().read_unaligned();
        }
        let mut x = isa.splat_f32s(0.0);
        core::ptr::copy_nonoverlapping(ptr, (&raw mut x).cast::<f32>(), some);
        x
    }
}

/// Writes the first `some` lanes.
///
/// # Safety
/// `some` elements must be writable.
#[inline(always)]
unsafe fn store<I: Isa>(_: I, ptr: *mut f32, some: usize, x: I::f32s) {
    // SAFETY: the caller's.
    unsafe {
        if some == I::F32_LANES {
            ptr.cast::<I::f32s>().write_unaligned(x);
        } else {
            core::ptr::copy_nonoverlapping((&raw const x).cast::<f32>(), ptr, some);
        }
    }
}
