//! The terms between the scaled score and the softmax, on a block of transposed scores `st[j][i]`: cap,
//! slopes, visibility; bias and mask are in `extra.rs`. Each is a pass of its own over a block that lies in
//! the nearest cache; only blocks that need a pass pay for it.

use core::ops::Range;

use crate::View;
use crate::block::Stack;
use crate::call::Call;
use crate::isa::Isa;
use crate::pack::MAX_ROWS;

/// The query rows of a block, token by token, the heads inside.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub heads: &'a [usize],
    /// Head, by its place among `heads`, and token of row 0.
    pub head: usize,
    pub token: usize,
    pub count: usize,
}

impl Rows<'_> {
    /// Head and token of a row.
    #[inline(always)]
    pub fn get(&self, row: usize) -> (usize, usize) {
        let place = self.head + row;
        (self.heads[place % self.heads.len()], self.token + place / self.heads.len())
    }

    /// `f(lane, head, token)` for the first lanes. Lanes past the rows repeat the last one, so that they
    /// compute something harmless.
    #[inline(always)]
    pub fn each(&self, lanes: usize, mut f: impl FnMut(usize, usize, usize)) {
        if let [head] = *self.heads {
            for i in 0..lanes {
                f(i, head, self.token + i.min(self.count - 1));
            }
            return;
        }
        let (mut head, mut token) = (self.head, self.token);
        for i in 0..lanes {
            f(i, self.heads[head], token);
            if i + 1 < self.count {
                head += 1;
                if head == self.heads.len() {
                    (head, token) = (0, token + 1);
                }
            }
        }
    }

    /// The rows of a view in which tokens of a batch entry lie one stride apart, one for each lane.
    #[inline(always)]
    pub fn pointers<T>(&self, x: &View<'_, T>, b: usize, lanes: usize) -> [*const T; MAX_ROWS] {
        let [_, by_head, by_token, _] = x.strides();
        let (first_head, first_token) = self.get(0);
        let first = x.row(b, first_head, first_token);
        let mut pointers = [core::ptr::null(); MAX_ROWS];
        self.each(lanes, |i, head, token| {
            let (heads, tokens) = (head as isize - first_head as isize, (token - first_token) as isize);
            pointers[i] = first.wrapping_offset(heads * by_head + tokens * by_token);
        });
        pointers
    }

    /// `NQ` vectors with `f(head, token)` of each lane.
    #[inline(always)]
    pub fn lanes<I: Isa, const NQ: usize>(&self, isa: I, f: impl Fn(usize, usize) -> f32) -> [I::f32s; NQ] {
        let mut x = [isa.splat_f32s(0.0); NQ];
        // SAFETY: `x` is `NQ * LANES` f32.
        self.fill(unsafe { core::slice::from_raw_parts_mut(x.as_mut_ptr().cast(), NQ * I::F32_LANES) }, f);
        x
    }

    /// Not inlined: once for a block of rows and without vectors, but unrolled a large part of the code.
    #[inline(never)]
    fn fill(&self, x: &mut [f32], f: impl Fn(usize, usize) -> f32) {
        self.each(x.len(), |i, head, token| x[i] = f(head, token));
    }
}

/// `st = cap * tanh(st / cap)`.
///
/// # Safety
/// `st` must hold `vectors` vectors.
#[inline(always)]
pub(crate) unsafe fn cap<I: Isa>(isa: I, st: *mut I::f32s, vectors: usize, cap: f32) {
    let (cap, inverse) = (isa.splat_f32s(cap), isa.splat_f32s(1.0 / cap));
    for x in 0..vectors {
        // SAFETY: the caller's.
        let st = unsafe { &mut *st.add(x) };
        *st = isa.mul_f32s(cap, crate::exp::tanh(isa, isa.mul_f32s(*st, inverse)));
    }
}

/// `st[j][i] -= slope_i * |pos_i - j|` for the keys `keys`.
///
/// # Safety
/// `st` must hold `keys.len() * NQ` vectors.
#[inline(always)]
pub(crate) unsafe fn slopes<I: Isa, const NQ: usize>(
    isa: I,
    stack: &Stack<'_>,
    rows: &Rows<'_>,
    slopes: &[f32],
    st: *mut I::f32s,
    keys: Range<usize>,
) {
    let (call, b) = (stack.call, stack.b);
    // Distances from the first key of the block: exact in f32 up to 2^24.
    let ahead = |_, token| call.pos(b, token).saturating_sub(keys.start as i64) as f32;
    let slope: [I::f32s; NQ] = rows.lanes(isa, |head, _| -slopes[head] * stack.unit);
    let ahead: [I::f32s; NQ] = rows.lanes(isa, ahead);
    for j in 0..keys.len() {
        let j_f32 = isa.splat_f32s(j as f32);
        for n in 0..NQ {
            // SAFETY: the caller's.
            let st = unsafe { &mut *st.add(j * NQ + n) };
            let distance = isa.abs_f32s(isa.sub_f32s(ahead[n], j_f32));
            *st = isa.mul_add_e_f32s(slope[n], distance, *st);
        }
    }
}

/// Hides the pairs outside each row's interval of keys.
///
/// # Safety
/// `st` must hold `keys.len() * NQ` vectors.
#[inline(always)]
pub(crate) unsafe fn hide<I: Isa, const NQ: usize>(
    isa: I,
    call: &Call<'_>,
    b: usize,
    rows: &Rows<'_>,
    st: *mut I::f32s,
    keys: Range<usize>,
) {
    let clamp = |j: usize| j.clamp(keys.start, keys.end) - keys.start;
    let (mut start, mut len) = ([isa.splat_u32s(0); NQ], [isa.splat_u32s(0); NQ]);
    let [starts, lens] = [&mut start, &mut len].map(|x| x.as_mut_ptr().cast::<u32>());
    let (mut last, mut bounds) = (None, [0, 0]);
    rows.each(NQ * I::F32_LANES, |i, _, token| {
        if last != Some(token) {
            let visible = call.keys(b, token);
            let [start, end] = [visible.start, visible.end].map(clamp);
            (last, bounds) = (Some(token), [start as u32, end.saturating_sub(start) as u32]);
        }
        // SAFETY: both are `NQ * LANES` u32.
        unsafe { (*starts.add(i), *lens.add(i)) = (bounds[0], bounds[1]) };
    });
    let minus_inf = isa.splat_f32s(f32::NEG_INFINITY);
    for j in 0..keys.len() {
        let j_u32 = isa.splat_u32s(j as u32);
        for n in 0..NQ {
            // SAFETY: the caller's.
            let st = unsafe { &mut *st.add(j * NQ + n) };
            // Unsigned: below the start wraps round to a large number.
            let visible = isa.less_than_u32s(isa.sub_u32s(j_u32, start[n]), len[n]);
            *st = isa.select_f32s(visible, *st, minus_inf);
        }
    }
}

/// The largest score of each lane; NaN may or may not count.
///
/// # Safety
/// `st` must hold `keys * NQ` vectors.
#[inline(always)]
pub(crate) unsafe fn max<I: Isa, const NQ: usize>(isa: I, st: *const I::f32s, keys: usize) -> [I::f32s; NQ] {
    let mut max = [isa.splat_f32s(f32::NEG_INFINITY); NQ];
    for j in 0..keys {
        for (n, max) in max.iter_mut().enumerate() {
            // SAFETY: the caller's.
            *max = isa.max_f32s(unsafe { *st.add(j * NQ + n) }, *max);
        }
    }
    max
}

/// A vector that counts up from `first`.
#[inline(always)]
pub(crate) fn count_from<I: Isa>(isa: I, first: usize) -> I::f32s {
    let mut x = isa.splat_f32s(0.0);
    let flat = (&raw mut x).cast::<f32>();
    for i in 0..I::F32_LANES {
        // SAFETY: `x` is `LANES` f32.
        unsafe { *flat.add(i) = (first + i) as f32 };
    }
    x
}
