//! The fused kernel for many queries. A vector lane is a query row, so that everything about a row (maximum, sum,
//! rescaling) is lane-wise:
//!
//! ```text
//! for each block of keys, for each block of query rows:
//!     scores  st[j][i] = sum over c of k[j][c] * qt[c][i]      k[j][c]: a scalar from the caller's memory
//!     terms   st[j][i] = cap, slopes, bias, visibility         only blocks that need them
//!     max     new[i]   = max(m[i], max over j of st[j][i])
//!     exp     st[j][i] = exp(st[j][i] - new[i]);  l[i] = l[i] * exp(m[i] - new[i]) + sum over j of st[j][i]
//!     values  ot[c][i] = ot[c][i] * exp(m[i] - new[i]) + sum over j of v[j][c] * st[j][i]
//! out[i][c] = ot[c][i] / l[i]
//! ```
//!
//! (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", section 3; Dao et al. 2022,
//! "FlashAttention", algorithm 1.)
//!
//! Why it is fast: both products are the register tile of `tile.rs` at the multiply-add limit; K and V are read in
//! place at any stride; only Q is packed, once; the score block stays in the nearest cache. Many query rows run
//! over each block of keys before the next one, so K and V come from memory once for all of them.
//!
//! The rows of a key/value head are stacked token by token, the heads of the group inside: row `r` is token
//! `r / heads`, head `r % heads`. A block of rows is then narrow in tokens, and causal edges are thin.
//!
//! The bits of a row depend on where the key blocks lie (multiples of `KEYS`) and on nothing else: lanes do not
//! mix, and a hidden pair adds an exact 0.

use core::ops::Range;

use crate::call::Task;
use crate::careful;
use crate::exp::exp;
use crate::isa::Isa;
use crate::level::Op;
use crate::pack::{self, MAX_ROWS};
use crate::scratch::Scratch;
use crate::terms::{self, Rows, Seen};
use crate::tile::{self, Tile};
use crate::{Element, View};

/// Keys in a block. 64 to 256 are within 3 % of each other; 128 rows of K and V at D = 64 fill half of a usual
/// second-level cache's ways, and the score block a third of the first level.
const KEYS: usize = 128;

/// Query rows that share a block of keys.
const ROWS: usize = 256;

/// Scratch for packed queries and outputs, in f32: with large heads fewer rows share a block of keys.
const QUERY_SCRATCH: usize = 128 << 10;

pub(crate) struct Prefill<'t, 'a, T> {
    pub task: Task<'a, T>,
    pub scratch: &'t mut Scratch,
}

/// A block of query rows, as wide as the register tile.
#[derive(Clone, Copy)]
struct Block {
    /// First row, and how many.
    row: usize,
    count: usize,
    /// Nothing has been added yet: `ot` holds garbage.
    fresh: bool,
    /// A tile had hidden pairs.
    hidden: bool,
}

/// What all blocks of a task share.
struct Shared<'a, T> {
    task: &'a Task<'a, T>,
    heads: &'a [usize],
    d: usize,
    dv: usize,
}

/// The buffers of one block of rows.
#[derive(Clone, Copy)]
struct Buffers<V> {
    qt: *mut V,
    ot: *mut V,
    ml: *mut V,
    st: *mut V,
    extra: *mut V,
}

/// Rows of K or V from the first key of a block on, features side by side.
#[derive(Clone, Copy)]
struct Source {
    ptr: *const f32,
    row: isize,
}

impl<T: Element> Op for Prefill<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa, const NQ: usize, const MR: usize>(self, isa: I) {
        let task = &self.task;
        let call = task.call;
        let (memory, heads) = self.scratch.parts();
        let group = task.hk * call.group..(task.hk + 1) * call.group;
        let gate = |head: usize| call.terms.gates.map_or(1.0, |gates| gates[head]);
        heads.clear();
        heads.extend(group.clone().filter(|&head| gate(head) != 0.0));
        let end = task.tokens.end.min(call.q_len(task.b));
        for head in group {
            let idle = if gate(head) == 0.0 { task.tokens.start } else { end };
            for token in idle.max(task.tokens.start)..task.tokens.end {
                // SAFETY: a row of this task.
                unsafe { zero(task, head, token) };
            }
        }
        let shared = Shared { task, heads, d: call.q.shape()[3], dv: call.v.shape()[3] };
        let rows = end.saturating_sub(task.tokens.start) * heads.len();

        let width = NQ * I::F32_LANES;
        let fitting = QUERY_SCRATCH / ((shared.d + shared.dv).max(1) * width);
        let blocks = (ROWS / width).min(fitting).min(rows.div_ceil(width)).max(1);
        let extra = call.terms.bias.is_some() || call.terms.mask.is_some();
        let copy_k = needs_copy(&call.k, blocks);
        let copy_v = needs_copy(&call.v, blocks);
        let [qt, ot, ml, st, extra, kc, vc] = Scratch::take(
            memory,
            [
                blocks * shared.d * width,
                blocks * shared.dv * width,
                blocks * 2 * width,
                KEYS * width,
                if extra { KEYS * width } else { 0 },
                if copy_k { KEYS * shared.d } else { 0 },
                if copy_v { KEYS * shared.dv } else { 0 },
            ],
        );
        let mut buffers = |block: usize| Buffers::<I::f32s> {
            qt: qt.as_mut_ptr().wrapping_add(block * shared.d * width).cast(),
            ot: ot.as_mut_ptr().wrapping_add(block * shared.dv * width).cast(),
            ml: ml.as_mut_ptr().wrapping_add(block * 2 * width).cast(),
            st: st.as_mut_ptr().cast(),
            extra: extra.as_mut_ptr().cast(),
        };

        let mut first = 0;
        while first < rows {
            let mut table = [Block { row: 0, count: 0, fresh: true, hidden: false }; ROWS];
            let stop = rows.min(first + blocks * width);
            let count = (stop - first).div_ceil(width);
            for (x, block) in table[..count].iter_mut().enumerate() {
                block.row = first + x * width;
                block.count = width.min(stop - block.row);
                // SAFETY: the buffers were taken for `blocks` blocks of these sizes.
                unsafe {
                    if block.count <= I::F32_LANES {
                        shared.begin::<I, 1>(isa, block, buffers(x));
                    } else {
                        shared.begin::<I, NQ>(isa, block, buffers(x));
                    }
                }
            }
            // The union of the rows' intervals of keys, cut at multiples of KEYS.
            let visible = shared.keys(first).start..shared.keys(stop - 1).end;
            let mut start = visible.start;
            while start < visible.end {
                let keys = start..visible.end.min((start / KEYS + 1) * KEYS);
                // SAFETY: `keys` lies inside the axis; the copies have room for KEYS rows.
                let (k, v) = unsafe {
                    (
                        source(isa, &call.k, task, &keys, copy_k.then_some(kc.as_mut_ptr())),
                        source(isa, &call.v, task, &keys, copy_v.then_some(vc.as_mut_ptr())),
                    )
                };
                for (x, block) in table[..count].iter_mut().enumerate() {
                    // SAFETY: as above.
                    unsafe {
                        if block.count <= I::F32_LANES {
                            shared.step::<I, 1, MR>(isa, block, buffers(x), [k, v], &keys);
                        } else {
                            shared.step::<I, NQ, MR>(isa, block, buffers(x), [k, v], &keys);
                        }
                    }
                }
                start = keys.end;
            }
            for (x, block) in table[..count].iter().enumerate() {
                // SAFETY: as above.
                unsafe {
                    if block.count <= I::F32_LANES {
                        shared.end::<I, 1>(isa, block, buffers(x));
                    } else {
                        shared.end::<I, NQ>(isa, block, buffers(x));
                    }
                }
            }
            first = stop;
        }
    }
}

/// Writes a row that sees nothing.
///
/// # Safety
/// The row must be one of the task's.
unsafe fn zero<T: Element>(task: &Task<'_, T>, head: usize, token: usize) {
    let (out, stride, lse) = task.row(head, token);
    for c in 0..task.call.v.shape()[3] {
        // SAFETY: inside the output's shape.
        unsafe { *out.wrapping_offset(c as isize * stride) = T::from_f32(0.0) };
    }
    if let Some(lse) = lse {
        // SAFETY: inside the LSE.
        unsafe { *lse = f32::NEG_INFINITY };
    }
}

/// Whether blocks of K or V are copied to compact f32 first: where they must be, and where rows lie so far apart
/// that they share cache sets and take a page each, and enough query rows use the copy.
#[inline(always)]
fn needs_copy<T: Element>(view: &View<'_, T>, blocks: usize) -> bool {
    let [_, _, row, feature] = view.strides();
    let scattered = row.unsigned_abs() > 2 * view.shape()[3].max(32) && blocks >= 2;
    feature != 1 || T::in_place(core::ptr::null()).is_none() || scattered
}

/// The rows `keys` of K or V: in place, or copied to `copy`.
///
/// # Safety
/// `keys` must lie inside the axis, `copy` must have room for them.
#[inline(always)]
unsafe fn source<I: Isa, T: Element>(
    isa: I,
    view: &View<'_, T>,
    task: &Task<'_, T>,
    keys: &Range<usize>,
    copy: Option<*mut f32>,
) -> Source {
    let [_, _, row, feature] = view.strides();
    let ptr = view.row(task.b, task.hk, keys.start);
    match (copy, T::in_place(ptr)) {
        (None, Some(ptr)) => Source { ptr, row },
        (None, None) => unreachable!("a type that needs widening is copied"),
        (Some(copy), _) => {
            let d = view.shape()[3];
            // SAFETY: the caller's.
            unsafe { pack::copy(isa, ptr, [row, feature], keys.len(), d, copy) };
            Source { ptr: copy, row: d as isize }
        }
    }
}

impl<T: Element> Shared<'_, T> {
    #[inline(always)]
    fn token(&self, row: usize) -> usize {
        self.task.tokens.start + row / self.heads.len()
    }

    /// The interval of keys of a row.
    #[inline(always)]
    fn keys(&self, row: usize) -> Range<usize> {
        self.task.call.keys(self.task.b, self.token(row))
    }

    #[inline(always)]
    fn rows(&self, block: &Block) -> Rows {
        let mut rows = Rows { count: block.count, head: [0; MAX_ROWS], token: [0; MAX_ROWS] };
        let (mut token, mut head) = (self.token(block.row), block.row % self.heads.len());
        for i in 0..MAX_ROWS {
            (rows.head[i], rows.token[i]) = (self.heads[head], token);
            if i + 1 < block.count {
                head += 1;
                if head == self.heads.len() {
                    (head, token) = (0, token + 1);
                }
            }
        }
        rows
    }

    /// Packs the queries, scaled, and starts maximum and sum: from the sink, or from nothing.
    ///
    /// # Safety
    /// The buffers must hold blocks of `NQ` vectors.
    #[inline(always)]
    unsafe fn begin<I: Isa, const NQ: usize>(&self, isa: I, block: &Block, buffers: Buffers<I::f32s>) {
        let call = self.task.call;
        let rows = self.rows(block);
        let q = core::array::from_fn(|i| call.q.row(self.task.b, rows.head[i], rows.token[i]));
        // SAFETY: rows of Q have D features at their stride.
        unsafe { pack::pack::<I, T, NQ>(isa, &q, call.q.strides()[3], self.d, call.scale, buffers.qt) };
        let sink = |i: usize| call.terms.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[rows.head[i]]);
        let m: [I::f32s; NQ] = terms::lanes(isa, sink);
        let l: [I::f32s; NQ] = terms::lanes(isa, |i| if sink(i) == f32::NEG_INFINITY { 0.0 } else { 1.0 });
        // SAFETY: the caller's.
        unsafe { *buffers.ml.cast() = [m, l] };
    }

    /// One block of rows over one block of keys.
    ///
    /// # Safety
    /// The buffers must hold blocks of `NQ` vectors; `source` must hold the rows `keys` of K and V.
    #[inline(always)]
    unsafe fn step<I: Isa, const NQ: usize, const MR: usize>(
        &self,
        isa: I,
        block: &mut Block,
        buffers: Buffers<I::f32s>,
        [k, v]: [Source; 2],
        keys: &Range<usize>,
    ) {
        let (call, b) = (self.task.call, self.task.b);
        let (first, last) = (self.keys(block.row), self.keys(block.row + block.count - 1));
        // Visible to some row, and to all rows, of the block.
        let seen = keys.start.max(first.start)..keys.end.min(last.end);
        if seen.is_empty() {
            return;
        }
        let edge = seen.start < last.start || first.end < seen.end;
        let skip = (seen.start - keys.start) as isize;
        let (k, v) = (k.skip(skip), v.skip(skip));
        let n = seen.len();
        let Buffers { qt, ot, ml, st, extra } = buffers;
        let terms = &call.terms;

        // SAFETY: `st` and `extra` hold KEYS rows of NQ vectors, `qt` D and `ot` Dv rows; K and V the caller's.
        unsafe {
            let rows = self.rows(block);
            let mut biased = false;
            if terms.mask.is_some() || terms.bias.is_some() {
                match terms::fill::<I, T, NQ>(isa, call, b, &rows, extra, seen.clone()) {
                    Seen::Nothing => {
                        block.hidden = true;
                        return;
                    }
                    Seen::Some => (biased, block.hidden) = (true, true),
                    Seen::All => biased = terms.bias.is_some(),
                }
            }

            let mut scores =
                Scores { isa, d: self.d, k, qt, st, max: [isa.splat_f32s(f32::NEG_INFINITY); NQ] };
            tile::cover::<MR>(n, &mut scores);
            let mut max = scores.max;

            if edge || biased || terms.softcap.is_some() || terms.slopes.is_some() {
                if let Some(cap) = terms.softcap {
                    terms::cap(isa, st, n * NQ, cap);
                }
                if let Some(slopes) = terms.slopes {
                    terms::slopes::<I, T, NQ>(isa, call, b, &rows, slopes, st, seen.clone());
                }
                if biased {
                    terms::add(isa, st, extra, n * NQ);
                }
                if edge {
                    block.hidden = true;
                    terms::hide::<I, T, NQ>(isa, call, b, &rows, st, seen.clone());
                }
                max = terms::max::<I, NQ>(isa, st, n);
            }

            let ml = &mut *ml.cast::<[[I::f32s; NQ]; 2]>();
            let correction = softmax(isa, st, n, max, ml);
            let fresh = core::mem::replace(&mut block.fresh, false);
            tile::cover::<MR>(self.dv, &mut Values { isa, n, v, st, ot, correction, fresh });
        }
    }

    /// Divides by the sums and writes the rows.
    ///
    /// # Safety
    /// The buffers must hold blocks of `NQ` vectors.
    #[inline(always)]
    unsafe fn end<I: Isa, const NQ: usize>(&self, isa: I, block: &Block, buffers: Buffers<I::f32s>) {
        let (task, call) = (self.task, self.task.call);
        let rows = self.rows(block);
        // SAFETY: the caller's.
        let [m, l] = unsafe { *buffers.ml.cast::<[[I::f32s; NQ]; 2]>() };
        if block.fresh {
            for c in 0..self.dv * NQ {
                // SAFETY: `ot` holds Dv rows.
                unsafe { *buffers.ot.add(c) = isa.splat_f32s(0.0) };
            }
        }
        let zero = isa.splat_f32s(0.0);
        let gate: [I::f32s; NQ] =
            terms::lanes(isa, |i| call.terms.gates.map_or(1.0, |gates| gates[rows.head[i]]));
        let factor = core::array::from_fn(|n| {
            isa.select_f32s(isa.equal_f32s(l[n], zero), zero, isa.div_f32s(gate[n], l[n]))
        });
        let mut out = [core::ptr::null_mut(); MAX_ROWS];
        let mut stride = 1;
        for i in 0..block.count {
            let lse;
            (out[i], stride, lse) = task.row(rows.head[i], rows.token[i]);
            if let Some(lse) = lse {
                // SAFETY: `m` and `l` have NQ * LANES >= count lanes; the LSE is the task's.
                unsafe {
                    let (m, l) = (*m.as_ptr().cast::<f32>().add(i), *l.as_ptr().cast::<f32>().add(i));
                    *lse = if l == 0.0 { f32::NEG_INFINITY } else { m + l.ln() };
                }
            }
        }
        // SAFETY: rows of the task, Dv features each.
        unsafe { pack::unpack::<I, T, NQ>(isa, buffers.ot, factor, &out, block.count, stride, self.dv) };
        if block.hidden {
            self.mend::<I, NQ>(isa, block, &rows, buffers.ot);
        }
    }

    /// Computes rows once more, pair by pair, that are not finite although, or because, pairs are hidden.
    #[inline(always)]
    fn mend<I: Isa, const NQ: usize>(&self, isa: I, block: &Block, rows: &Rows, ot: *mut I::f32s) {
        let task = self.task;
        let mut check = [isa.splat_f32s(0.0); NQ];
        for c in 0..self.dv {
            for (n, check) in check.iter_mut().enumerate() {
                // SAFETY: `ot` holds Dv rows of NQ vectors. 0 * x is 0, or NaN where x is not finite.
                *check = isa.mul_add_e_f32s(unsafe { *ot.add(c * NQ + n) }, isa.splat_f32s(0.0), *check);
            }
        }
        for i in 0..block.count {
            // SAFETY: `check` has NQ * LANES >= count lanes.
            if unsafe { *check.as_ptr().cast::<f32>().add(i) } == 0.0 {
                continue;
            }
            // SAFETY: this block's `ot` holds more than Dv f32 and has been written out.
            let acc = unsafe { core::slice::from_raw_parts_mut(ot.cast::<f32>(), self.dv) };
            let row_lse = careful::row(task.call, task.b, rows.head[i], rows.token[i], acc);
            let (out, stride, lse) = task.row(rows.head[i], rows.token[i]);
            for (c, x) in acc.iter().enumerate() {
                // SAFETY: a row of the task.
                unsafe { *out.wrapping_offset(c as isize * stride) = T::from_f32(*x) };
            }
            if let Some(lse) = lse {
                // SAFETY: the task's.
                unsafe { *lse = row_lse };
            }
        }
    }
}

impl Source {
    #[inline(always)]
    fn skip(self, rows: isize) -> Self {
        Self { ptr: self.ptr.wrapping_offset(rows * self.row), ..self }
    }
}

/// Online softmax: turns scores into weights relative to the new maximum, in place; returns the factor for what
/// was accumulated under the old one.
///
/// # Safety
/// `st` must hold `n * NQ` vectors.
#[inline(always)]
unsafe fn softmax<I: Isa, const NQ: usize>(
    isa: I,
    st: *mut I::f32s,
    n: usize,
    max: [I::f32s; NQ],
    [m, l]: &mut [[I::f32s; NQ]; 2],
) -> [I::f32s; NQ] {
    let zero = isa.splat_f32s(0.0);
    let minus_inf = isa.splat_f32s(f32::NEG_INFINITY);
    let (mut shift, mut sum, mut correction) = ([zero; NQ], [zero; NQ], [zero; NQ]);
    for x in 0..NQ {
        let new = isa.max_f32s(m[x], max[x]);
        // While nothing is visible the maximum is -inf; -inf - 0 is -inf, whose exp is 0.
        shift[x] = isa.select_f32s(isa.equal_f32s(new, minus_inf), zero, new);
        correction[x] = exp(isa, isa.sub_f32s(m[x], shift[x]));
        m[x] = new;
    }
    for j in 0..n {
        for x in 0..NQ {
            // SAFETY: the caller's.
            let st = unsafe { &mut *st.add(j * NQ + x) };
            *st = exp(isa, isa.sub_f32s(*st, shift[x]));
            sum[x] = isa.add_f32s(sum[x], *st);
        }
    }
    for x in 0..NQ {
        l[x] = isa.mul_add_e_f32s(l[x], correction[x], sum[x]);
    }
    correction
}

/// `st[j] = sum over c of k[j][c] * qt[c]`, and the maximum over j.
struct Scores<I: Isa, const NQ: usize> {
    isa: I,
    d: usize,
    k: Source,
    qt: *const I::f32s,
    st: *mut I::f32s,
    max: [I::f32s; NQ],
}

impl<I: Isa, const NQ: usize> Tile for Scores<I, NQ> {
    #[inline(always)]
    fn tile<const M: usize>(&mut self, j: usize) {
        let Self { isa, d, k, qt, st, .. } = *self;
        // SAFETY: `step` made this with D readable features for each key, and room in `st`.
        unsafe {
            let acc = tile::product::<I, NQ, M>(isa, d, k.skip(j as isize).ptr, [k.row, 1], qt);
            for (m, acc) in acc.iter().enumerate() {
                for x in 0..NQ {
                    self.max[x] = isa.max_f32s(acc[x], self.max[x]);
                    *st.add((j + m) * NQ + x) = acc[x];
                }
            }
        }
    }
}

/// `ot[c] = ot[c] * correction + sum over j of v[j][c] * st[j]`.
struct Values<I: Isa, const NQ: usize> {
    isa: I,
    n: usize,
    v: Source,
    st: *const I::f32s,
    ot: *mut I::f32s,
    correction: [I::f32s; NQ],
    fresh: bool,
}

impl<I: Isa, const NQ: usize> Tile for Values<I, NQ> {
    #[inline(always)]
    fn tile<const M: usize>(&mut self, c: usize) {
        let Self { isa, n, v, st, ot, correction, fresh } = *self;
        // SAFETY: `step` made this with `n` readable values, and room in `ot` for every feature.
        unsafe {
            let acc = tile::product::<I, NQ, M>(isa, n, v.ptr.wrapping_add(c), [1, v.row], st);
            for (m, acc) in acc.iter().enumerate() {
                for x in 0..NQ {
                    let ot = &mut *ot.add((c + m) * NQ + x);
                    *ot = if fresh { acc[x] } else { isa.mul_add_e_f32s(*ot, correction[x], acc[x]) };
                }
            }
        }
    }
}
