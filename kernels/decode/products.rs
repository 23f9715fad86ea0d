//! The two products of `decode.rs` over a chunk of keys: scores, with lanes along the features of a key, and
//! values, with lanes along those of a value.

use super::order::WIDE;
use super::{CHUNK, Few, Pointers};
use crate::element::{Load, Store};
use crate::isa::Isa;

impl Few<'_> {
    /// Scores of all rows over `n` keys. Asks for the values.
    ///
    /// # Safety
    /// `k` must hold rows of `d` readable elements.
    #[inline(always)]
    pub(super) unsafe fn scores<I: Isa, C: Load, const NQ: usize>(
        &self,
        isa: I,
        n: usize,
        k: &Pointers,
        v: &Pointers,
    ) {
        // SAFETY: the caller's; there are `count` rows.
        unsafe {
            let mut r = 0;
            while NQ >= 4 && r + 4 <= self.count {
                self.score_rows::<I, C, 4>(isa, r, n, k, v);
                r += 4;
            }
            while r + 2 <= self.count {
                self.score_rows::<I, C, 2>(isa, r, n, k, v);
                r += 2;
            }
            if r < self.count {
                self.score_rows::<I, C, 1>(isa, r, n, k, v);
            }
        }
    }

    /// Four keys at a time for `R` rows from `first` on.
    #[inline(always)]
    unsafe fn score_rows<I: Isa, C: Load, const R: usize>(
        &self,
        isa: I,
        first: usize,
        n: usize,
        k: &Pointers,
        v: &Pointers,
    ) {
        let (q, lanes) = (self.q.wrapping_add(first * self.d), I::F32_LANES);
        let bytes = if first == 0 { self.bytes[1] } else { 0 };
        // With 16 registers it costs more to know whether a line is new than to ask twice.
        let each = lanes < 16 || lanes * size_of::<C>() >= 64;
        for j in (0..n).step_by(4) {
            let k = [k[j], k[j + 1], k[j + 2], k[j + 3]].map(<*const u8>::cast::<C>);
            let v = [v[j], v[j + 1], v[j + 2], v[j + 3]];
            // A line of V for a line of K.
            let ask = |c: usize| {
                let byte = c * size_of::<C>();
                if byte < bytes && (each || byte.is_multiple_of(64)) {
                    for v in v {
                        isa.prefetch(v.wrapping_add(byte));
                    }
                }
            };
            let mut acc = [[isa.splat_f32s(0.0); 4]; R];
            let mut c = 0;
            while C::even_first::<I>() && c + 2 * lanes <= self.d {
                ask(c);
                let k =
                    [k[0].wrapping_add(c), k[1].wrapping_add(c), k[2].wrapping_add(c), k[3].wrapping_add(c)];
                // SAFETY: the caller's, of two whole vectors.
                unsafe {
                    let k = [
                        C::load_two(isa, k[0]),
                        C::load_two(isa, k[1]),
                        C::load_two(isa, k[2]),
                        C::load_two(isa, k[3]),
                    ];
                    let q = q.wrapping_add(c);
                    add(isa, &mut acc, q, self.d, [k[0][0], k[1][0], k[2][0], k[3][0]]);
                    add(isa, &mut acc, q.wrapping_add(lanes), self.d, [k[0][1], k[1][1], k[2][1], k[3][1]]);
                }
                c += 2 * lanes;
            }
            for c in (c..self.d).step_by(lanes) {
                ask(c);
                // SAFETY: the caller's, of whole vectors.
                unsafe {
                    let k = [
                        C::load(isa, k[0].wrapping_add(c)),
                        C::load(isa, k[1].wrapping_add(c)),
                        C::load(isa, k[2].wrapping_add(c)),
                        C::load(isa, k[3].wrapping_add(c)),
                    ];
                    add(isa, &mut acc, q.wrapping_add(c), self.d, k);
                }
            }
            for (r, acc) in acc.into_iter().enumerate() {
                // SAFETY: a row of scores has room for whole fours.
                unsafe { *self.s.add((first + r) * CHUNK + j).cast() = isa.sums(acc) };
            }
        }
    }

    /// Adds the weighted values of `n` keys to the records. Asks for the rows `ahead`, but for those that the softmax has
    /// asked for.
    ///
    /// # Safety
    /// `v` must hold rows of `dv` readable elements.
    #[inline(always)]
    pub(super) unsafe fn values<I: Isa, C: Load, const NQ: usize>(
        &self,
        isa: I,
        n: usize,
        v: &Pointers,
        ahead: &Pointers,
        whole: bool,
    ) {
        // SAFETY: the caller's; there are `count` rows.
        unsafe {
            let mut r = 0;
            while NQ >= 4 && whole && r + 4 <= self.count {
                self.value_rows::<I, C, 4>(isa, r, n, v, ahead, None);
                r += 4;
            }
            while whole && r + 2 <= self.count {
                self.value_rows::<I, C, 2>(isa, r, n, v, ahead, None);
                r += 2;
            }
            while r < self.count {
                let seen = if whole { None } else { Some(self.seen[r]) };
                self.value_rows::<I, C, 1>(isa, r, n, v, ahead, seen);
                r += 1;
            }
        }
    }

    /// `R` rows from `first` on.
    #[inline(always)]
    unsafe fn value_rows<I: Isa, C: Load, const R: usize>(
        &self,
        isa: I,
        first: usize,
        n: usize,
        v: &Pointers,
        ahead: &Pointers,
        seen: Option<u64>,
    ) {
        let (lanes, mut c) = (I::F32_LANES, 0);
        // SAFETY: the caller's.
        unsafe {
            while c + WIDE * lanes <= self.dv {
                let ahead = if first == 0 { Some(ahead) } else { None };
                self.value_tile::<I, C, R, WIDE>(isa, first, n, v, c, ahead, seen);
                c += WIDE * lanes;
            }
            while c < self.dv {
                let ahead = if first == 0 { Some(ahead) } else { None };
                self.value_tile::<I, C, R, 1>(isa, first, n, v, c, ahead, seen);
                c += lanes;
            }
        }
    }

    /// `W` vectors of features from `c` on, of `R` rows from `first` on.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    unsafe fn value_tile<I: Isa, C: Load, const R: usize, const W: usize>(
        &self,
        isa: I,
        first: usize,
        n: usize,
        v: &Pointers,
        c: usize,
        ahead: Option<&Pointers>,
        seen: Option<u64>,
    ) {
        let mut acc = [[isa.splat_f32s(0.0); W]; R];
        // SAFETY: the caller's; a record holds `dv` f32 and more.
        unsafe {
            for (r, acc) in acc.iter_mut().enumerate() {
                let correction = isa.splat_f32s(self.correction[first + r]);
                for (x, acc) in acc.iter_mut().enumerate() {
                    let o = f32::load(isa, self.o[first + r].add(c + x * I::F32_LANES));
                    *acc = isa.mul_f32s(o, correction);
                }
            }
            for j in 0..n {
                if let (Some(ahead), true) = (ahead, j >= self.count) {
                    for x in 0..W {
                        let byte = (c + x * I::F32_LANES) * size_of::<C>();
                        if byte.is_multiple_of(64) && byte < self.bytes[0] {
                            isa.prefetch(ahead[j].wrapping_add(byte));
                        }
                    }
                }
                if seen.is_some_and(|seen| seen >> j & 1 == 0) {
                    continue;
                }
                let row = v[j].cast::<C>().wrapping_add(c);
                let mut value = [isa.splat_f32s(0.0); W];
                if C::even_first::<I>() && W == WIDE {
                    for (x, two) in value.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                        *two = C::load_two(isa, row.wrapping_add(2 * x * I::F32_LANES));
                    }
                } else {
                    for (x, value) in value.iter_mut().enumerate() {
                        *value = C::load(isa, row.wrapping_add(x * I::F32_LANES));
                    }
                }
                for (r, acc) in acc.iter_mut().enumerate() {
                    let weight = isa.splat_f32s(*self.s.add((first + r) * CHUNK + j));
                    for (acc, value) in acc.iter_mut().zip(value) {
                        *acc = isa.mul_add_e_f32s(weight, value, *acc);
                    }
                }
            }
            for (r, acc) in acc.iter().enumerate() {
                for (x, acc) in acc.iter().enumerate() {
                    f32::store(isa, self.o[first + r].add(c + x * I::F32_LANES), *acc);
                }
            }
        }
    }
}

/// Adds the products of a vector of each of `R` queries, `d` apart, with those of four keys.
///
/// # Safety
/// The queries must be readable.
#[inline(always)]
unsafe fn add<I: Isa, const R: usize>(
    isa: I,
    acc: &mut [[I::f32s; 4]; R],
    q: *const f32,
    d: usize,
    k: [I::f32s; 4],
) {
    for (r, acc) in acc.iter_mut().enumerate() {
        // SAFETY: the caller's.
        let q = unsafe { f32::load(isa, q.wrapping_add(r * d)) };
        for (acc, k) in acc.iter_mut().zip(k) {
            *acc = isa.mul_add_e_f32s(q, k, *acc);
        }
    }
}
