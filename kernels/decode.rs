//! The fused kernel for few query rows: decoding, with one query against a long cache. Reading K and V is all
//! that it costs, so each is read once, by all the rows of its head, in order:
//!
//! ```text
//! for each chunk of keys:
//!     scores  s[r][j] = sum over c of q[r][c] * k[j][c]      lanes along c; V of the chunk is asked for
//!     terms   s[r][j] = cap, slopes, bias, visibility        lanes along j
//!     softmax m[r] = max(m[r], s[r][j]), s[r][j] = exp(s[r][j] - m[r]), l[r] += their sum, apart in lanes
//!                                                            a key of the next chunk is asked for with each row
//!     values  o[r][c] = o[r][c] * correction + sum over j of s[r][j] * v[j][c]
//!                                                            lanes along c; and the other keys of the next chunk
//! ```
//!
//! Why it is fast: while one of K and V is computed with, the other is on its way from memory, a chunk ahead,
//! which keeps the memory busy all the time; and the chunk lies in a near cache for all rows but the first.
//!
//! Not in tiles: with queries and weights as the sums of three bf16, which is exact, both products of bf16 ran at
//! 12.7 GB/s out of the second-level cache, where multiply-adds then reached 16.5 and now reach 20. K and V have to
//! come from there either way, V has to be put in pairs, and the sums are loaded and stored for every chunk.
//!
//! Long caches are cut in spans (`Call::spans`), whose results are joined in their order. The bits of a row
//! depend on where chunks and spans lie, and on nothing else.
//!
//! A hidden pair is left out of the sums altogether, so nothing that it holds can leak.

use core::marker::PhantomData;
use core::ops::Range;

use half::{bf16, f16};

use crate::block::{Block, Stack};
use crate::call::Call;
use crate::clock::Part;
use crate::element::{Store, Stored};
use crate::isa::Isa;
use crate::join::place;
use crate::level::Op;
use crate::pack::{self, MAX_ROWS};
use crate::prefill::KEYS;
use crate::products::Products;
use crate::scratch::Scratch;
use crate::split::Task;
use crate::tensor::Tensor;
use crate::terms::Rows;
use crate::{DType, Error, Level};

mod order;
mod passes;
mod products;

/// Computes the rows of a task over its span.
///
/// # Errors
/// [`Error::LevelUnavailable`].
pub(crate) fn decode(task: Task<'_>, level: Level, scratch: &mut Scratch) -> Result<(), Error> {
    let lanes = level.lanes()?;
    let copied = [&task.call.k, &task.call.v].into_iter().any(|x| needs_copy(x, lanes));
    match if copied { DType::F32 } else { task.call.k.dtype } {
        DType::F32 => level.dispatch(Decode { task, scratch, stored: PhantomData::<f32> }),
        DType::F16 => level.dispatch(Decode { task, scratch, stored: PhantomData::<f16> }),
        DType::Bf16 => level.dispatch(Decode { task, scratch, stored: PhantomData::<bf16> }),
        DType::I8 => level.dispatch(Decode { task, scratch, stored: PhantomData::<i8> }),
    }
}

/// For the type of K and V: unlike the kernel for many rows this one reads them where they lie, unless rows are
/// no whole vectors side by side with one scale. Then both are copied as f32 first, but for what is f32 and need
/// not be.
struct Decode<'t, 'a, C> {
    task: Task<'a>,
    scratch: &'t mut Scratch,
    stored: PhantomData<C>,
}

/// Keys of a chunk at most, for which a row has a bit each.
const CHUNK: usize = 64;
const _: () = assert!(CHUNK <= 64 && KEYS.is_multiple_of(CHUNK));

/// Keys of a chunk, for rows of so many bytes. Few: while the softmax of a chunk runs, the memory has only what
/// was asked for before. In percent of the read rate, group 4, 4096 keys, with 16, 32 and 64 keys at AVX-512: f32
/// of D 128 105, 98, 96; f16 80, 75, 70; bf16 76, 74, 71, and of D 64 60, 64, 66; at AVX2 f32 of D 128 92, 78, -,
/// of D 64 87, 78, -, and f16, which takes long there, 35, 37, 40.
const fn chunk<C>(row: usize, lanes: usize) -> usize {
    if row >= 256 && (size_of::<C>() == size_of::<f32>() || lanes >= 16) { CHUNK / 4 } else { CHUNK }
}

/// The rows of K or V for the keys of a chunk, all of them readable in whole vectors.
type Pointers = [*const u8; CHUNK];

/// The rows at work, and their buffers. `rows` knows head and token of row `r`.
struct Few<'a> {
    call: &'a Call<'a>,
    b: usize,
    rows: Rows<'a>,
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
    /// Bytes of a row of K and of V in memory.
    bytes: [usize; 2],
    /// Bit `j` of word `r`: row `r` sees key `j` of the chunk.
    seen: [u64; MAX_ROWS],
}

impl<C: Stored> Op for Decode<'_, '_, C> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa, const NQ: usize, const MR: usize>(self, isa: I) {
        let Task { call, b, hk, tokens, keys: span, ahead, after, part, .. } = self.task;
        let (d, dv) = (call.q.shape()[3], call.v.shape()[3]);
        let (memory, heads, _, clock) = self.scratch.parts();
        heads.clear();
        heads.extend(call.open(call.heads_of(hk)));
        let lanes = I::F32_LANES;
        let count = heads.len() * call.q_len(b);
        debug_assert!(count <= MAX_ROWS);
        let (dq, width) = (d.next_multiple_of(lanes), dv.next_multiple_of(lanes));
        // Only where `C` is f32: `decode` has seen to it.
        let copy = |x: &Tensor<'_>| x.dtype != C::DTYPE || needs_copy(x, lanes);
        let (copy_k, copy_v) = (copy(&call.k), copy(&call.v));
        let chunk = chunk::<C>(d.max(dv) * size_of::<C>(), lanes);
        let copied = |copy: bool, width: usize| if copy { chunk * width } else { 0 };
        let [q, s, l, kc, vc] = Scratch::take(
            memory,
            [count * dq, count * CHUNK, count * lanes, copied(copy_k, dq), copied(copy_v, width)],
        );
        if count > 0 {
            let (token, products, statistics, unit) = (tokens.start, Products::MultiplyAdds, None, 1.0);
            let span_of_all = span.clone();
            let stack = Stack {
                call,
                b,
                hk,
                heads,
                token,
                span: span_of_all,
                part,
                products,
                unit,
                statistics,
                clock,
            };
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
                bytes: [d, dv].map(|features| features * call.k.dtype.size()),
                seen: [0; MAX_ROWS],
            };
            for r in 0..count {
                let (head, token) = few.rows.get(r);
                few.o[r] = place(part, call, hk, head, token);
                let keys = stack.keys(r);
                few.keys[r] = [keys.start, keys.end];
            }
            let visible = few.keys[0][0]..few.keys[count - 1][1];
            let end = call.keys(b, few.rows.get(count - 1).1).end.min(ahead);
            // SAFETY: the buffers were taken for these rows; `visible` lies inside the axis; copies have room
            // for a chunk.
            unsafe {
                clock.start();
                few.begin(isa, span.start == 0);
                // Queries and, until the end, records in the order in which K and V are loaded.
                if C::even_first::<I>() {
                    (0..count).for_each(|r| order::as_loaded(few.q.add(r * dq), dq, lanes));
                }
                clock.lap(Part::Packing);
                // From a multiple of the chunk on, so that the lanes of a row's sum are the same keys always.
                let first = if visible.is_empty() { visible.start } else { visible.start / chunk * chunk };
                let mut keys = first..visible.end.min(first + chunk);
                let [mut v, mut even_k, mut odd_k] = [[core::ptr::null(); CHUNK]; 3];
                let (mut k, mut next_k) = (&mut even_k, &mut odd_k);
                few.pointers(&call.k, b, hk, &keys, k);
                while !keys.is_empty() {
                    let n = keys.len();
                    few.pointers(&call.v, b, hk, &keys, &mut v);
                    let next = keys.end..visible.end.min(keys.end + chunk);
                    let rest = keys.end..end.min(keys.end + chunk);
                    few.pointers(&call.k, b, hk, &rest, next_k);
                    if let (true, Some(next)) = (rest.is_empty(), after) {
                        let start = call.keys(next.b, next.token).start;
                        let rest = start..call.kv_len(next.b).min(start + chunk);
                        few.pointers(&call.k, next.b, next.hk, &rest, next_k);
                        for head in call.heads_of(next.hk) {
                            for byte in (0..d * call.q.dtype.size()).step_by(64) {
                                isa.prefetch(call.q.row(next.b, head, next.token).wrapping_add(byte));
                            }
                        }
                    }
                    clock.start();
                    if copy_k {
                        few.copy(isa, &call.k, hk, &keys, (kc.as_mut_ptr(), k));
                    }
                    clock.lap(Part::Packing);
                    few.scores::<I, C, NQ>(isa, n, k, &v);
                    if !copy_k {
                        few.scale(isa, &call.k, hk, &keys);
                    }
                    clock.lap(Part::Scores);
                    let whole = few.terms(isa, &keys);
                    clock.lap(Part::Terms);
                    few.softmax(isa, n, next_k);
                    clock.lap(Part::Softmax);
                    if copy_v {
                        few.copy(isa, &call.v, hk, &keys, (vc.as_mut_ptr(), &mut v));
                    } else {
                        few.scale(isa, &call.v, hk, &keys);
                    }
                    clock.lap(Part::Packing);
                    few.values::<I, C, NQ>(isa, n, &v, next_k, whole);
                    clock.lap(Part::Values);
                    keys = next;
                    core::mem::swap(&mut k, &mut next_k);
                }
                clock.start();
                if C::even_first::<I>() {
                    (0..count).for_each(|r| order::in_turn(few.o[r], width, lanes));
                }
                few.end(isa);
                clock.lap(Part::Writing);
            }
        }
    }
}

/// Whether rows have to be copied, as f32, to be read in whole vectors with one scale.
#[inline(always)]
fn needs_copy(x: &Tensor<'_>, lanes: usize) -> bool {
    let features = x.shape()[3];
    !x.is_dense()
        || !features.is_multiple_of(lanes)
        || x.scale_strides().is_some_and(|(_, per)| per < features)
}

impl Few<'_> {
    /// Scales the queries and starts the records: with the sink, where this span counts it.
    ///
    /// # Safety
    /// The buffers must be there for `count` rows.
    #[inline(always)]
    unsafe fn begin<I: Isa>(&mut self, isa: I, with_sink: bool) {
        for r in 0..self.count {
            let (head, token) = self.rows.get(r);
            // SAFETY: a row of Q; the caller's.
            unsafe {
                let to = core::slice::from_raw_parts_mut(self.q.add(r * self.d), self.d);
                pack::copy(isa, &self.call.q, [self.b, head, token], 1, to.as_mut_ptr());
                let (features, rest) = to.split_at_mut(self.call.q.shape()[3]);
                features.iter_mut().for_each(|x| *x *= self.call.scale);
                rest.fill(0.0);
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

    /// Finds the rows of K or V for some keys; past them the last one again, up to whole fours.
    fn pointers(&self, x: &Tensor<'_>, b: usize, hk: usize, keys: &Range<usize>, pointers: &mut Pointers) {
        let (mut row, mut j) = (core::ptr::null(), 0);
        while j < keys.len() {
            let (first, stride) = (x.row(b, hk, keys.start + j), x.strides()[2]);
            let run = x.run(b, keys.start + j).min(keys.len() - j);
            for (i, pointer) in pointers[j..j + run].iter_mut().enumerate() {
                row = first.wrapping_offset(i as isize * stride);
                *pointer = row;
            }
            j += run;
        }
        for pointer in &mut pointers[j..j.next_multiple_of(4)] {
            *pointer = row;
        }
    }

    /// Copies rows side by side as f32, filled with zeros up to whole vectors.
    ///
    /// # Safety
    /// The keys must be there, `to` must hold whole vectors for each.
    #[inline(always)]
    unsafe fn copy<I: Isa>(
        &self,
        isa: I,
        x: &Tensor<'_>,
        hk: usize,
        keys: &Range<usize>,
        (to, pointers): (*mut f32, &mut Pointers),
    ) {
        let (features, n) = (x.shape()[3], keys.len());
        let width = features.next_multiple_of(I::F32_LANES);
        for (j, pointer) in pointers[..n].iter_mut().enumerate() {
            let to = to.wrapping_add(j * width);
            // SAFETY: the caller's.
            unsafe {
                pack::copy(isa, x, [self.b, hk, keys.start + j], 1, to);
                core::slice::from_raw_parts_mut(to.add(features), width - features).fill(0.0);
            }
            *pointer = to.cast_const().cast();
        }
        let last = pointers[n - 1];
        pointers[n..n.next_multiple_of(4)].fill(last);
    }
}
