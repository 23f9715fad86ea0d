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
//! Long caches are cut in spans (`Call::spans`), whose results are joined in their order. The bits of a row
//! depend on where chunks and spans lie, and on nothing else.
//!
//! A hidden pair is left out of the sums altogether, so nothing that it holds can leak.

use core::ops::Range;

use crate::block::{Block, Stack};
use crate::call::Call;
use crate::element::Lanes;
use crate::isa::Isa;
use crate::join::place;
use crate::level::Op;
use crate::pack::MAX_ROWS;
use crate::prefill::KEYS;
use crate::scratch::Scratch;
use crate::split::Task;
use crate::terms::Rows;
use crate::{Element, View};

mod passes;

/// Computes the rows of a task over its span.
pub(crate) struct Decode<'t, 'a, T> {
    pub task: Task<'a, T>,
    pub scratch: &'t mut Scratch,
}

/// Keys of a chunk at most: with 64 (at D = 128, f32) chunks crowd each other out of the nearest cache, with
/// 16 the softmax costs more.
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
    /// The interval of keys of each row, in this span; both ends grow with the row.
    keys: [[usize; 2]; MAX_ROWS],
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
        heads.extend(call.open_heads(hk));
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
                seen: [0; MAX_ROWS],
            };
            for r in 0..count {
                few.o[r] = place(part, call, hk, few.rows.head[r], few.rows.token[r]);
                let keys = stack.keys(r);
                few.keys[r] = [keys.start, keys.end];
            }
            let visible = few.keys[0][0]..few.keys[count - 1][1];
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
}
