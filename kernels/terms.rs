//! The terms between the scaled score and the softmax, on a block of transposed scores `st[j][i]`: cap, slopes,
//! bias and mask, visibility. Each is a pass of its own over a block that lies in the nearest cache; only blocks
//! that need a pass pay for it.

use core::ops::Range;

use crate::call::Call;
use crate::isa::Isa;
use crate::pack::MAX_ROWS;
use crate::{Element, View};

/// The query rows of a block: head and token of each lane. Lanes past its rows repeat the last one, so that they
/// compute something harmless.
pub(crate) struct Rows {
    pub head: [usize; MAX_ROWS],
    pub token: [usize; MAX_ROWS],
}

/// What a block of mask and bias leaves visible.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    Nothing,
    Some,
    All,
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
pub(crate) unsafe fn slopes<I: Isa, T: Element, const NQ: usize>(
    isa: I,
    call: &Call<'_, T>,
    b: usize,
    rows: &Rows,
    slopes: &[f32],
    st: *mut I::f32s,
    keys: Range<usize>,
) {
    // Distances from the first key of the block: exact in f32 up to 2^24.
    let ahead = |i: usize| call.pos(b, rows.token[i]).saturating_sub(keys.start as i64) as f32;
    let slope: [I::f32s; NQ] = lanes(isa, |i| -slopes[rows.head[i]]);
    let ahead: [I::f32s; NQ] = lanes(isa, ahead);
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

/// `st += extra` (or not, for scores of an earlier stage), and exactly -inf where `extra` is -inf, whatever `st`
/// was. Returns the largest score of each lane.
///
/// # Safety
/// `st` and `extra` must hold `keys * NQ` vectors.
#[inline(always)]
pub(crate) unsafe fn add<I: Isa, const NQ: usize>(
    isa: I,
    st: *mut I::f32s,
    extra: *const I::f32s,
    keys: usize,
    sum: bool,
) -> [I::f32s; NQ] {
    let minus_inf = isa.splat_f32s(f32::NEG_INFINITY);
    let mut max = [minus_inf; NQ];
    for j in 0..keys {
        for (n, max) in max.iter_mut().enumerate() {
            // SAFETY: the caller's.
            let (st, extra) = unsafe { (&mut *st.add(j * NQ + n), *extra.add(j * NQ + n)) };
            let x = if sum { isa.add_f32s(*st, extra) } else { *st };
            *st = isa.select_f32s(isa.equal_f32s(extra, minus_inf), minus_inf, x);
            *max = isa.max_f32s(*st, *max);
        }
    }
    max
}

/// Hides the pairs outside each row's interval of keys.
///
/// # Safety
/// `st` must hold `keys.len() * NQ` vectors.
#[inline(always)]
pub(crate) unsafe fn hide<I: Isa, T: Element, const NQ: usize>(
    isa: I,
    call: &Call<'_, T>,
    b: usize,
    rows: &Rows,
    st: *mut I::f32s,
    keys: Range<usize>,
) {
    let clamp = |j: usize| j.clamp(keys.start, keys.end) - keys.start;
    let start: [I::u32s; NQ] = lanes_u32(isa, |i| clamp(call.keys(b, rows.token[i]).start) as u32);
    let len: [I::u32s; NQ] = lanes_u32(isa, |i| {
        let visible = call.keys(b, rows.token[i]);
        clamp(visible.end).saturating_sub(clamp(visible.start)) as u32
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

/// Writes `extra[j][i]`, the bias of each pair, -inf where the mask hides it, and says what is visible. Where
/// nothing is to be added or hidden, or all is hidden, nothing is written.
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
    let (bias, mask) = (&call.terms.bias, &call.terms.mask);
    let shown = mask.as_ref().map_or(Seen::All, |mask| seen(mask, b, rows, width, &keys, |shown| shown));
    if shown == Seen::Nothing || (shown == Seen::All && bias.is_none()) {
        return shown;
    }
    // SAFETY: the caller's, and `keys` and `rows` are inside the shape that mask and bias broadcast to.
    unsafe {
        if let Some(bias) = bias {
            // A look at one pair tells most blocks that hide nothing from those that hide all.
            let first = bias.get([b, rows.head[0], rows.token[0], keys.start]);
            let shows = |x: f32| x != f32::NEG_INFINITY;
            if first == Some(f32::NEG_INFINITY) && seen(bias, b, rows, width, &keys, shows) == Seen::Nothing {
                return Seen::Nothing;
            }
            let load = |ptr: *const f32| ptr.cast::<I::f32s>().read_unaligned();
            transpose::<I, f32, NQ>(isa, bias, b, rows, extra, &keys, load, |x| x);
        }
        match (mask, bias) {
            (Some(mask), None) => {
                transpose::<I, bool, NQ>(isa, mask, b, rows, extra, &keys, |ptr| isa.load_mask(ptr), hidden);
            }
            (Some(mask), Some(_)) if shown == Seen::Some => {
                mask_over(mask, b, rows, extra.cast(), width, &keys)
            }
            _ => {}
        }
    }
    Seen::Some
}

/// What the pairs of a block show, by `shows`.
#[inline(always)]
fn seen<E: Copy>(
    view: &View<'_, E>,
    b: usize,
    rows: &Rows,
    width: usize,
    keys: &Range<usize>,
    shows: impl Fn(E) -> bool,
) -> Seen {
    let [_, head, token, key] = view.strides();
    let same = head == 0 && token == 0;
    let (mut any, mut all) = (false, true);
    for i in 0..if same { 1 } else { width } {
        let row = view.row(b, rows.head[i], rows.token[i]).wrapping_offset(keys.start as isize * key);
        if key == 1 {
            // SAFETY: the keys of a row lie side by side inside the view.
            for x in unsafe { core::slice::from_raw_parts(row, keys.len()) } {
                let shown = shows(*x);
                any |= shown;
                all &= shown;
            }
        } else {
            for j in 0..keys.len() {
                // SAFETY: inside the shape.
                let shown = shows(unsafe { *row.wrapping_offset(j as isize * key) });
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

#[inline(always)]
fn hidden(shown: bool) -> f32 {
    if shown { 0.0 } else { f32::NEG_INFINITY }
}

/// Mask and bias together: hides pairs of a block that already holds the bias.
///
/// # Safety
/// `extra` must hold `keys.len() * width` f32.
#[inline(always)]
unsafe fn mask_over(
    mask: &View<'_, bool>,
    b: usize,
    rows: &Rows,
    extra: *mut f32,
    width: usize,
    keys: &Range<usize>,
) {
    for i in 0..width {
        let row = mask.row(b, rows.head[i], rows.token[i]);
        for (x, j) in keys.clone().enumerate() {
            // SAFETY: the caller's; inside the shape of the mask.
            unsafe {
                if !*row.wrapping_offset(j as isize * mask.strides()[3]) {
                    *extra.add(x * width + i) = f32::NEG_INFINITY;
                }
            }
        }
    }
}

/// `extra[j][i] = view[b, head_i, token_i, j]`. Rows that are all the same (stride 0) are read once; contiguous
/// keys go through registers; the rest element by element.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "two of them say how an element becomes f32")]
unsafe fn transpose<I: Isa, E: Copy, const NQ: usize>(
    isa: I,
    view: &View<'_, E>,
    b: usize,
    rows: &Rows,
    extra: *mut I::f32s,
    keys: &Range<usize>,
    load: impl Fn(*const E) -> I::f32s,
    element: impl Fn(E) -> f32,
) {
    let (lanes, n) = (I::F32_LANES, keys.len());
    let [_, head, token, key] = view.strides();
    let row = |i: usize| view.row(b, rows.head[i], rows.token[i]).wrapping_offset(keys.start as isize * key);
    // SAFETY: every (row, key) is inside the shape, so each element read here is inside the view.
    unsafe {
        if head == 0 && token == 0 {
            for j in 0..n {
                let x = isa.splat_f32s(element(*row(0).wrapping_offset(j as isize * key)));
                for q in 0..NQ {
                    *extra.add(j * NQ + q) = x;
                }
            }
        } else if key == 1 && n >= lanes {
            for q in 0..NQ {
                let mut j = 0;
                loop {
                    let mut square = isa.square();
                    for (i, x) in square.as_mut().iter_mut().enumerate() {
                        *x = load(row(q * lanes + i).wrapping_add(j));
                    }
                    for (t, x) in isa.transpose(square).as_ref().iter().enumerate() {
                        *extra.add((j + t) * NQ + q) = *x;
                    }
                    if j + lanes == n {
                        break;
                    }
                    j = (j + lanes).min(n - lanes); // the last block overlaps
                }
            }
        } else {
            for i in 0..NQ * lanes {
                for j in 0..n {
                    let x = element(*row(i).wrapping_offset(j as isize * key));
                    *extra.cast::<f32>().add(j * NQ * lanes + i) = x;
                }
            }
        }
    }
}

/// `NQ` vectors with `f(i)` in lane `i`.
#[inline(always)]
pub(crate) fn lanes<I: Isa, const NQ: usize>(isa: I, f: impl Fn(usize) -> f32) -> [I::f32s; NQ] {
    let mut x = [isa.splat_f32s(0.0); NQ];
    let flat = x.as_mut_ptr().cast::<f32>();
    for i in 0..NQ * I::F32_LANES {
        // SAFETY: `x` is `NQ * LANES` f32.
        unsafe { *flat.add(i) = f(i) };
    }
    x
}

#[inline(always)]
fn lanes_u32<I: Isa, const NQ: usize>(isa: I, f: impl Fn(usize) -> u32) -> [I::u32s; NQ] {
    let mut x = [isa.splat_u32s(0); NQ];
    let flat = x.as_mut_ptr().cast::<u32>();
    for i in 0..NQ * I::F32_LANES {
        // SAFETY: `x` is `NQ * LANES` u32.
        unsafe { *flat.add(i) = f(i) };
    }
    x
}
