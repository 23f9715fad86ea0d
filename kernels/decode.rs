//! The fused kernel for few query rows: decoding, with one query against a long cache. Reading K and V is all
//! that it costs, so each is read once, by all the rows of its head, in order:
//!
//! ```text
//! for each chunk of keys:
//!     scores  s[r][j] = sum over c of q[r][c] * k[j][c]      lanes along c; V of the chunk is asked for
//!     terms   s[r][j] = cap, slopes, bias, visibility        lanes along j
//!     softmax m[r], l[r] as in `prefill.rs`
//!     values  o[r][c] = o[r][c] * correction + sum over j of s[r][j] * v[j][c]
//!                                                            lanes along c; K of the next chunk is asked for
//! ```
//!
//! Why it is fast: while one of K and V is computed with, the other is on its way from memory, a chunk ahead,
//! which keeps the memory busy all the time; and the chunk lies in a near cache for all rows but the first.
//!
//! Long caches are split in spans, which are computed apart and joined in their order. The bits of a row depend
//! on where chunks and spans lie (`Split`, a function of the shape) and on nothing else.
//!
//! A hidden pair is left out of the sums altogether, so nothing that it holds can leak.

use core::ops::Range;

use crate::block::{Block, Stack};
use crate::call::Call;
use crate::element::Lanes;
use crate::exp::exp;
use crate::isa::Isa;
use crate::join::{place, state};
use crate::level::Op;
use crate::pack::MAX_ROWS;
use crate::prefill::KEYS;
use crate::scratch::Scratch;
use crate::split::Task;
use crate::terms::{self, Rows};
use crate::{Element, View};

/// Computes the rows of a task over its span.
pub(crate) struct Decode<'t, 'a, T> {
    pub task: Task<'a, T>,
    pub scratch: &'t mut Scratch,
}

/// Keys of a chunk at most: with 64 (at D = 128, f32) chunks crowd each other out of the nearest cache, with 16
/// the softmax costs more.
const CHUNK: usize = 32;
const _: () = assert!(CHUNK <= 64 && KEYS.is_multiple_of(CHUNK), "a row has a bit for each key of a chunk");

/// The rows of K or V for the keys of a chunk, all of them readable in whole vectors.
type Pointers<T> = [*const T; CHUNK];

/// The rows at work, and their buffers. Row `r` is query `token[r]` of head `head[r]`.
struct Few<'a, T> {
    call: &'a Call<'a, T>,
    b: usize,
    rows: Rows,
    count: usize,
    /// Scaled queries, `d` of them a row, a multiple of the lanes.
    q: *mut f32,
    d: usize,
    /// `CHUNK` scores a row, then weights.
    s: *mut f32,
    dv: usize,
    /// The record of each row.
    o: [*mut f32; MAX_ROWS],
    /// Running maximum of each row, and a vector of sums.
    m: [f32; MAX_ROWS],
    l: *mut f32,
    /// Factor of each row on what was accumulated before.
    correction: [f32; MAX_ROWS],
    /// The interval of keys of each row.
    keys: [[usize; 2]; MAX_ROWS],
    /// The keys in all of these intervals.
    common: Range<usize>,
    /// Bit `j` of word `r`: row `r` sees key `j` of the chunk.
    seen: [u64; MAX_ROWS],
}

impl<T: Element> Op for Decode<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa, const NQ: usize, const MR: usize>(self, isa: I) {
        let Task { call, b, hk, tokens, keys: span, ahead, after, part, .. } = self.task;
        let (d, dv) = (call.q.shape()[3], call.v.shape()[3]);
        let (memory, heads, _) = self.scratch.parts();
        heads.clear();
        for head in hk * call.group..(hk + 1) * call.group {
            if call.terms.gates.is_none_or(|gates| gates[head] != 0.0) {
                heads.push(head);
            }
        }
        let lanes = I::F32_LANES;
        let count = heads.len() * call.q_len(b);
        debug_assert!(count <= MAX_ROWS);
        let (dq, width) = (d.next_multiple_of(lanes), dv.next_multiple_of(lanes));
        let (copy_k, copy_v) = (needs_copy(&call.k, lanes), needs_copy(&call.v, lanes));
        let copied =
            |copy: bool, width: usize| if copy { (CHUNK * width * size_of::<T>()).div_ceil(4) } else { 0 };
        let [q, s, l, kc, vc] = Scratch::take(
            memory,
            [count * dq, count * CHUNK, count * lanes, copied(copy_k, dq), copied(copy_v, width)],
        );
        if count > 0 {
            let stack = Stack { call, b, hk, heads, token: tokens.start, span: span.clone(), part };
            let mut few = Few {
                call,
                b,
                rows: stack.rows(&Block::new(0, count)),
                count,
                q: q.as_mut_ptr(),
                d: dq,
                s: s.as_mut_ptr(),
                dv: width,
                o: [core::ptr::null_mut(); MAX_ROWS],
                m: [f32::NEG_INFINITY; MAX_ROWS],
                l: l.as_mut_ptr(),
                correction: [1.0; MAX_ROWS],
                keys: [[0; 2]; MAX_ROWS],
                common: stack.keys(count - 1).start..stack.keys(0).end,
                seen: [0; MAX_ROWS],
            };
            for r in 0..count {
                few.o[r] = place(part, call, hk, few.rows.head[r], few.rows.token[r]);
                few.keys[r] = [stack.keys(r).start, stack.keys(r).end];
            }
            let visible = few.keys[0][0].max(span.start)..few.keys[count - 1][1].min(span.end);
            let end = call.keys(b, few.rows.token[count - 1]).end.min(ahead);
            // SAFETY: the buffers were taken for these rows; `visible` lies inside the axis; copies have room
            // for a chunk.
            unsafe {
                few.begin(isa, span.start == 0);
                // From a multiple of CHUNK on, so that the lanes of a row's sum are the same keys always.
                let first = if visible.is_empty() { visible.start } else { visible.start / CHUNK * CHUNK };
                let mut keys = first..visible.end.min(first + CHUNK);
                let mut next_k = few.pointers(&call.k, b, hk, &keys);
                while !keys.is_empty() {
                    let (n, mut k, mut v) = (keys.len(), next_k, few.pointers(&call.v, b, hk, &keys));
                    let next = keys.end..visible.end.min(keys.end + CHUNK);
                    let rest = keys.end..end.min(keys.end + CHUNK);
                    next_k = few.pointers(&call.k, b, hk, &rest);
                    if let (true, Some(next)) = (rest.is_empty(), after) {
                        let start = call.keys(next.b, next.token).start;
                        let rest = start..call.kv_len(next.b).min(start + CHUNK);
                        next_k = few.pointers(&call.k, next.b, next.hk, &rest);
                    }
                    if copy_k {
                        k = few.copy(&call.k, &k, n, dq, kc.as_mut_ptr().cast());
                    }
                    few.scores::<I, NQ>(isa, n, &k, &v);
                    let whole = few.terms(isa, &keys);
                    few.softmax(isa, n);
                    if copy_v {
                        v = few.copy(&call.v, &v, n, width, vc.as_mut_ptr().cast());
                    }
                    few.values::<I, NQ>(isa, n, &v, &next_k, whole);
                    keys = next;
                }
                few.end(isa);
            }
        }
    }
}

/// Whether rows have to be copied to be read in whole vectors of f32 lanes.
#[inline(always)]
fn needs_copy<T>(view: &View<'_, T>, lanes: usize) -> bool {
    view.strides()[3] != 1 || !view.shape()[3].is_multiple_of(lanes)
}

impl<T: Element> Few<'_, T> {
    /// Scales the queries and starts the records: with the sink, where this span counts it.
    ///
    /// # Safety
    /// The buffers must be there for `count` rows.
    #[inline(always)]
    unsafe fn begin<I: Isa>(&mut self, isa: I, with_sink: bool) {
        let ([.., d], stride) = (self.call.q.shape(), self.call.q.strides()[3]);
        for r in 0..self.count {
            let (head, token) = (self.rows.head[r], self.rows.token[r]);
            let (from, to) = (self.call.q.row(self.b, head, token), self.q.wrapping_add(r * self.d));
            // SAFETY: rows of Q have D features at their stride; the caller's.
            unsafe {
                for c in 0..d {
                    *to.add(c) = (*from.wrapping_offset(c as isize * stride)).to_f32() * self.call.scale;
                }
                for c in d..self.d {
                    *to.add(c) = 0.0;
                }
                for c in (0..self.dv).step_by(I::F32_LANES) {
                    f32::store(isa, self.o[r].add(c), isa.splat_f32s(0.0));
                }
                let sink = self.call.terms.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[head]);
                let sink = if with_sink { sink } else { f32::NEG_INFINITY };
                self.m[r] = sink;
                let sum = self.l.add(r * I::F32_LANES);
                f32::store(isa, sum, isa.splat_f32s(0.0));
                *sum = if sink == f32::NEG_INFINITY { 0.0 } else { 1.0 };
            }
        }
    }

    /// The rows of K or V for some keys; past them the last one again, up to whole fours.
    #[inline(always)]
    fn pointers(&self, view: &View<'_, T>, b: usize, hk: usize, keys: &Range<usize>) -> Pointers<T> {
        let mut pointers = [core::ptr::null(); CHUNK];
        let (mut row, mut j) = (core::ptr::null(), 0);
        while j < keys.len() {
            let (first, stride) = (view.row(b, hk, keys.start + j), view.strides()[2]);
            let run = view.run(b, keys.start + j).min(keys.len() - j);
            for (i, pointer) in pointers[j..j + run].iter_mut().enumerate() {
                row = first.wrapping_offset(i as isize * stride);
                *pointer = row;
            }
            j += run;
        }
        for pointer in &mut pointers[j..j.next_multiple_of(4)] {
            *pointer = row;
        }
        pointers
    }

    /// Copies rows side by side, filled with zeros up to `width`.
    ///
    /// # Safety
    /// The first `n` pointers must be rows of the view, `to` must hold `CHUNK * width` elements.
    #[inline(always)]
    unsafe fn copy(
        &self,
        view: &View<'_, T>,
        from: &Pointers<T>,
        n: usize,
        width: usize,
        to: *mut T,
    ) -> Pointers<T> {
        let (features, stride) = (view.shape()[3], view.strides()[3]);
        let mut pointers = [core::ptr::null(); CHUNK];
        for j in 0..n.next_multiple_of(4) {
            let to = to.wrapping_add(j * width);
            pointers[j] = to.cast_const();
            // SAFETY: the caller's.
            unsafe {
                if stride == 1 {
                    core::ptr::copy_nonoverlapping(from[j], to, features);
                } else {
                    for c in 0..features {
                        *to.add(c) = *from[j].wrapping_offset(c as isize * stride);
                    }
                }
                for c in features..width {
                    *to.add(c) = T::from_f32(0.0);
                }
            }
        }
        pointers
    }

    /// Scores of all rows over `n` keys. Asks for the values.
    ///
    /// # Safety
    /// `k` must hold rows of `d` readable elements.
    #[inline(always)]
    unsafe fn scores<I: Isa, const NQ: usize>(&self, isa: I, n: usize, k: &Pointers<T>, v: &Pointers<T>) {
        // SAFETY: the caller's; there are `count` rows.
        unsafe {
            let mut r = 0;
            while NQ >= 4 && r + 4 <= self.count {
                self.score_rows::<I, 4>(isa, r, n, k, v);
                r += 4;
            }
            while r + 2 <= self.count {
                self.score_rows::<I, 2>(isa, r, n, k, v);
                r += 2;
            }
            if r < self.count {
                self.score_rows::<I, 1>(isa, r, n, k, v);
            }
        }
    }

    /// Four keys at a time for `R` rows from `first` on.
    #[inline(always)]
    unsafe fn score_rows<I: Isa, const R: usize>(
        &self,
        isa: I,
        first: usize,
        n: usize,
        k: &Pointers<T>,
        v: &Pointers<T>,
    ) {
        let q = self.q.wrapping_add(first * self.d);
        for j in (0..n).step_by(4) {
            let k = [k[j], k[j + 1], k[j + 2], k[j + 3]];
            let v = [v[j], v[j + 1], v[j + 2], v[j + 3]];
            let mut acc = [[isa.splat_f32s(0.0); 4]; R];
            for c in (0..self.d).step_by(I::F32_LANES) {
                if first == 0 {
                    for v in v {
                        isa.prefetch(v.wrapping_add(c).cast());
                    }
                }
                // SAFETY: the caller's, of whole vectors.
                unsafe {
                    let k = [
                        T::load(isa, k[0].wrapping_add(c)),
                        T::load(isa, k[1].wrapping_add(c)),
                        T::load(isa, k[2].wrapping_add(c)),
                        T::load(isa, k[3].wrapping_add(c)),
                    ];
                    for (r, acc) in acc.iter_mut().enumerate() {
                        let q = f32::load(isa, q.wrapping_add(r * self.d + c));
                        for (acc, k) in acc.iter_mut().zip(k) {
                            *acc = isa.mul_add_e_f32s(q, k, *acc);
                        }
                    }
                }
            }
            for (r, acc) in acc.into_iter().enumerate() {
                // SAFETY: a row of scores has room for whole fours.
                unsafe { *self.s.add((first + r) * CHUNK + j).cast() = isa.sums(acc) };
            }
        }
    }

    /// Cap, slopes, bias and visibility; -inf behind the keys up to a whole vector. Whether every row sees all
    /// of the keys.
    ///
    /// # Safety
    /// The scores must hold the keys, in whole vectors.
    #[inline(always)]
    unsafe fn terms<I: Isa>(&mut self, isa: I, keys: &Range<usize>) -> bool {
        let (terms, n, lanes) = (&self.call.terms, keys.len(), I::F32_LANES);
        let vectors = n.div_ceil(lanes);
        let plain = !self.call.is_masked() && terms.softcap.is_none() && terms.slopes.is_none();
        if plain && n % lanes == 0 && self.common.start <= keys.start && keys.end <= self.common.end {
            return true;
        }
        let mut whole = true;
        for r in 0..self.count {
            let (head, token) = (self.rows.head[r], self.rows.token[r]);
            let s: *mut I::f32s = self.s.wrapping_add(r * CHUNK).cast();
            let mut seen = interval(self.keys[r][0]..self.keys[r][1], keys);
            // SAFETY: the caller's.
            unsafe {
                if let Some(cap) = terms.softcap {
                    terms::cap(isa, s, vectors, cap);
                }
                if let Some(slopes) = terms.slopes {
                    let ahead = self.call.pos(self.b, token).saturating_sub(keys.start as i64) as f32;
                    let (ahead, slope) = (isa.splat_f32s(ahead), isa.splat_f32s(-slopes[head]));
                    for x in 0..vectors {
                        let [j]: [I::f32s; 1] = terms::lanes(isa, |i| (x * lanes + i) as f32);
                        let distance = isa.abs_f32s(isa.sub_f32s(ahead, j));
                        *s.add(x) = isa.mul_add_e_f32s(slope, distance, *s.add(x));
                    }
                }
                if let Some(bias) = &terms.bias {
                    let row = bias.row(self.b, head, token);
                    for j in 0..n {
                        let x = *row.wrapping_offset((keys.start + j) as isize * bias.strides()[3]);
                        *s.cast::<f32>().add(j) += x;
                        seen &= !(u64::from(x == f32::NEG_INFINITY) << j);
                    }
                }
                if let Some(mask) = &terms.mask {
                    let stride = mask.strides()[3];
                    let row = mask.row(self.b, head, token).wrapping_offset(keys.start as isize * stride);
                    seen &= if stride == 1 {
                        isa.bits(row, n)
                    } else {
                        (0..n).fold(0, |bits, j| {
                            bits | u64::from(*row.wrapping_offset(j as isize * stride)) << j
                        })
                    };
                }
                let all = seen == u64::MAX >> (64 - n);
                whole &= all;
                if !all || n % lanes > 0 {
                    for x in 0..vectors {
                        *s.add(x) = isa.hide(*s.add(x), seen >> (x * lanes));
                    }
                }
            }
            self.seen[r] = seen;
        }
        whole
    }

    /// One step of the online softmax for each row. The sums stay apart in lanes until the end, and nothing
    /// has to be rescaled where no score exceeds the maximum, which is nearly always.
    ///
    /// # Safety
    /// The scores must hold `n` keys, in whole vectors.
    #[inline(always)]
    unsafe fn softmax<I: Isa>(&mut self, isa: I, n: usize) {
        for r in 0..self.count {
            // SAFETY: the caller's; there is a vector of sums for each row.
            let (s, sum) = unsafe {
                let s = self.s.add(r * CHUNK).cast::<I::f32s>();
                let sum = self.l.add(r * I::F32_LANES).cast::<I::f32s>();
                (core::slice::from_raw_parts_mut(s, n.div_ceil(I::F32_LANES)), &mut *sum)
            };
            let before = isa.splat_f32s(self.m[r]);
            let mut max = before;
            for s in s.iter() {
                max = isa.max_f32s(*s, max);
            }
            self.correction[r] = 1.0;
            if isa.first_true_m32s(isa.greater_than_f32s(max, before)) < I::F32_LANES {
                self.m[r] = isa.reduce_max_f32s(max);
                let correction = exp(isa, isa.sub_f32s(before, isa.splat_f32s(shift(self.m[r]))));
                self.correction[r] = isa.reduce_max_f32s(correction);
                *sum = isa.mul_f32s(*sum, correction);
            }
            let shift = isa.splat_f32s(shift(self.m[r]));
            for s in s {
                *s = exp(isa, isa.sub_f32s(*s, shift));
                *sum = isa.add_f32s(*sum, *s);
            }
        }
    }

    /// Writes maximum and sum of each row to its record.
    ///
    /// # Safety
    /// There must be a vector of sums for each row.
    #[inline(always)]
    unsafe fn end<I: Isa>(&self, isa: I) {
        for r in 0..self.count {
            // SAFETY: the caller's.
            unsafe {
                let sum = isa.reduce_sum_f32s(*self.l.add(r * I::F32_LANES).cast::<I::f32s>());
                *state(self.o[r], self.call.v.shape()[3]) = [self.m[r], sum];
            }
        }
    }

    /// Adds the weighted values of `n` keys to the records. Asks for the rows `ahead`.
    ///
    /// # Safety
    /// `v` must hold rows of `dv` readable elements.
    #[inline(always)]
    unsafe fn values<I: Isa, const NQ: usize>(
        &self,
        isa: I,
        n: usize,
        v: &Pointers<T>,
        ahead: &Pointers<T>,
        whole: bool,
    ) {
        // SAFETY: the caller's; there are `count` rows.
        unsafe {
            let mut r = 0;
            while NQ >= 4 && whole && r + 4 <= self.count {
                self.value_rows::<I, 4>(isa, r, n, v, ahead, None);
                r += 4;
            }
            while whole && r + 2 <= self.count {
                self.value_rows::<I, 2>(isa, r, n, v, ahead, None);
                r += 2;
            }
            while r < self.count {
                let seen = if whole { None } else { Some(self.seen[r]) };
                self.value_rows::<I, 1>(isa, r, n, v, ahead, seen);
                r += 1;
            }
        }
    }

    /// `R` rows from `first` on.
    #[inline(always)]
    unsafe fn value_rows<I: Isa, const R: usize>(
        &self,
        isa: I,
        first: usize,
        n: usize,
        v: &Pointers<T>,
        ahead: &Pointers<T>,
        seen: Option<u64>,
    ) {
        let (lanes, mut c) = (I::F32_LANES, 0);
        // SAFETY: the caller's.
        unsafe {
            while c + 4 * lanes <= self.dv {
                let ahead = if first == 0 { Some(ahead) } else { None };
                self.value_tile::<I, R, 4>(isa, first, n, v, c, ahead, seen);
                c += 4 * lanes;
            }
            while c < self.dv {
                let ahead = if first == 0 { Some(ahead) } else { None };
                self.value_tile::<I, R, 1>(isa, first, n, v, c, ahead, seen);
                c += lanes;
            }
        }
    }

    /// `C` vectors of features from `c` on, of `R` rows from `first` on.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    unsafe fn value_tile<I: Isa, const R: usize, const C: usize>(
        &self,
        isa: I,
        first: usize,
        n: usize,
        v: &Pointers<T>,
        c: usize,
        ahead: Option<&Pointers<T>>,
        seen: Option<u64>,
    ) {
        let mut acc = [[isa.splat_f32s(0.0); C]; R];
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
                if let Some(ahead) = ahead {
                    for x in 0..C {
                        isa.prefetch(ahead[j].wrapping_add(c + x * I::F32_LANES).cast());
                    }
                }
                if let Some(seen) = seen {
                    if seen >> j & 1 == 0 {
                        continue;
                    }
                }
                let row = v[j].wrapping_add(c);
                let mut value = [isa.splat_f32s(0.0); C];
                for (x, value) in value.iter_mut().enumerate() {
                    *value = T::load(isa, row.wrapping_add(x * I::F32_LANES));
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

/// What to subtract before exp: the maximum, or 0 where nothing is visible yet.
#[inline(always)]
fn shift(max: f32) -> f32 {
    if max == f32::NEG_INFINITY { 0.0 } else { max }
}

/// The keys of a chunk that lie in an interval, as bits.
#[inline(always)]
fn interval(seen: Range<usize>, keys: &Range<usize>) -> u64 {
    let clamp = |j: usize| j.clamp(keys.start, keys.end) - keys.start;
    let below = |j: usize| if j == 0 { 0 } else { u64::MAX >> (64 - j) };
    below(clamp(seen.end)) & !below(clamp(seen.start))
}
