//! The fused kernel for many queries. A vector lane is a query row, so that everything about a row (maximum,
//! sum, rescaling) is lane-wise:
//!
//! ```text
//! for each block of keys, for each block of query rows:
//!     scores  st[j][i] = sum over c of k[j][c] * qt[c][i]      k[j][c]: a scalar from the caller's memory
//!     terms   st[j][i] = cap, slopes, bias, visibility         only blocks that need them
//!     max     new[i]   = max(m[i], max over j of st[j][i])
//!     power   st[j][i] = 4^(st[j][i] - new[i]);  l[i] = l[i] * 4^(m[i] - new[i]) + sum over j of st[j][i]
//!     values  ot[c][i] = ot[c][i] * 4^(m[i] - new[i]) + sum over j of v[j][c] * st[j][i]
//! out[i][c] = ot[c][i] / l[i]
//! ```
//!
//! Scores, and all that is added to them, are multiplied by `log4(e)`, at no cost where the scale is: powers of
//! 4 are had for less than those of e.
//!
//! (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", section 3; Dao et al. 2022,
//! "FlashAttention", algorithm 1.)
//!
//! Why it is fast: both products are the register tile of `tile.rs` at the multiply-add limit; K and V are
//! read in place at any stride; only Q is packed, once; the score block stays in the nearest cache. Many
//! query rows run over each block of keys before the next one, so K and V come from memory once for all of
//! them.
//!
//! The bits of a row depend on where the key blocks lie (multiples of `KEYS`) and on nothing else: lanes do
//! not mix, and a hidden pair adds an exact 0. But for NaN and infinities behind a hidden pair: `0 * NaN` is
//! NaN. A row that had hidden pairs and came out not finite is computed once more by itself, with zeros for
//! the values that it does not see: the same sums, the same bits, and only a NaN that it does see is left.

use core::ops::Range;

use crate::block::{Action, Block, Buffers, Goal, Span, Stack};
use crate::clock::Part;
use crate::exp::LOG4_E;
use crate::isa::Isa;
use crate::join;
use crate::level::Op;
use crate::pack;
use crate::products::{Products, Source};
use crate::received::Columns;
use crate::scratch::Scratch;
use crate::split::Task;
use crate::statistics::SUMS;
use crate::tensor::Tensor;
use crate::tile::Lines;
use crate::{Call, DType, pairs, tiles};

/// Keys in a block. Over 21 shapes, D and Dv 32 to 256, 64 to 4096 queries and keys, the median speed with 32,
/// 128 and 256 keys, in times of that with 64, is 0.96, 1.00 and 0.98 at AVX-512, with 32 and 128 it is 0.95
/// and 1.00 at AVX2; nothing depends on D.
pub(crate) const KEYS: usize = 64;
const _: () = assert!(KEYS <= 64, "a mask has a bit for each key of a block");

/// Query rows that share a block of keys, and where that is copied first, which takes as long as the products
/// of 10 to 20 rows. In place, 128 and 512 rows have 0.98 and 1.00 of the speed of 256.
const ROWS: [usize; 2] = [256, 512];

/// Most blocks of rows that share a block of keys: 256 rows at the narrowest tile.
const BLOCKS: usize = 32;

/// Bytes from row to row up to which K and V are read in place: at 1536, in percent of the speed of compact
/// rows, 103 rather than 96 at AVX-512 and the same 97 at AVX2; at 3072 no more than 98 rather than 97, and 89
/// rather than 98 (D 64, 512 keys: the bench `layouts`).
const NEAR: usize = 2048;

/// Scratch for packed queries and outputs, in f32: with large heads fewer rows share a block of keys.
const QUERY_SCRATCH: usize = 128 << 10;

/// Scratch for weights that are kept, likewise.
const KEPT_SCRATCH: usize = 256 << 10;

/// Computes the rows of a task.
pub(crate) struct Prefill<'t, 'a> {
    pub task: Task<'a>,
    /// What the level has.
    pub products: Products,
    pub scratch: &'t mut Scratch,
}

impl Op for Prefill<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa, const NQ: usize, const MR: usize>(self, isa: I) {
        let Task { call, b, hk, heads: of_task, tokens, keys: span, part, rows: out, after, .. } = self.task;
        let (d, dv) = (call.q.shape()[3], call.v.shape()[3]);
        let (memory, heads, leaked, clock) = self.scratch.parts();
        let end = tokens.end.min(call.q_len(b)).max(tokens.start); // `tokens` lie inside the batch entry
        heads.clear();
        heads.extend(call.open(of_task.clone()));
        if part.is_null() && (end < tokens.end || call.terms.gates.is_some()) {
            for (head, token) in join::rows(of_task, tokens.clone()) {
                if join::is_closed(call, b, head, token) {
                    // SAFETY: a row of this task.
                    unsafe { join::zero(call, [b, head, token], &out) };
                }
            }
        }
        let (token, products, statistics, unit) = (tokens.start, self.products, out.statistics, LOG4_E);
        let mut stack = Stack { call, b, hk, heads, token, span, part, products, unit, statistics, clock };
        let rows = (end - tokens.start) * heads.len();

        let width = NQ * I::F32_LANES;
        let fitting = QUERY_SCRATCH / ((d + dv).max(1) * width);
        let mut columns = match statistics {
            Some(sink) if sink.received && rows > 0 => {
                Columns::new(stack.keys(0).start..stack.keys(rows - 1).end, width)
            }
            _ => Columns::NONE,
        };
        let fitting = fitting.min(KEPT_SCRATCH / columns.kept().max(1));
        let blocks =
            (call.rows_of_a_task() / width).min(BLOCKS).min(fitting).min(rows.div_ceil(width)).max(1);
        let (mut copy_k, copy_v) = (needs_copy(&call.k, blocks), needs_copy(&call.v, blocks));
        // Two bf16 take the place of an f32.
        let [width_k, width_v] = stack.widths();
        if products == Products::Dots {
            let in_pairs = d == width_k && call.k.strides()[2] % size_of::<f32>() as isize == 0;
            copy_k = is_apart(&call.k, blocks) || !in_pairs;
        }
        let paired = products != Products::MultiplyAdds;
        let q_rows = if paired { width_k / 2 } else { d };
        let [qt, ot, ml, st, kc, vc, sums, kept, received] = Scratch::take(
            memory,
            [
                blocks * q_rows * width,
                blocks * width_v * width,
                blocks * 2 * width,
                KEYS * width,
                if paired { KEYS * width_k / 2 } else { KEYS * d },
                if paired { KEYS * width_v / 2 } else { KEYS * dv },
                if statistics.is_some() { blocks * SUMS * width } else { 0 },
                blocks * columns.kept(),
                columns.blocks * KEYS * I::F32_LANES,
            ],
        );
        received.fill(0.0);
        columns.sums = received.as_mut_ptr();
        if let Some(sink) = &mut stack.statistics {
            sink.columns = columns;
        }
        if products == Products::Tiles {
            // SAFETY: only a level that has them asks for them.
            unsafe { tiles::begin() };
        }
        let mut buffers = |block: usize| Buffers::<I::f32s> {
            qt: qt.as_mut_ptr().wrapping_add(block * q_rows * width).cast(),
            ot: ot.as_mut_ptr().wrapping_add(block * width_v * width).cast(),
            ml: ml.as_mut_ptr().wrapping_add(block * 2 * width).cast(),
            st: st.as_mut_ptr().cast(),
            sums: sums.as_mut_ptr().wrapping_add(block * SUMS * width).cast(),
            kept: kept.as_mut_ptr().wrapping_add(block * columns.kept()).cast(),
        };

        let mut next = 0;
        leaked.clear();
        loop {
            // The next rows, or one that has to be computed once more.
            let (first, stop, again) = match leaked.pop() {
                Some(row) => (row, row + 1, true),
                None if next < rows => (next, rows.min(next + blocks * width), false),
                None => break,
            };
            let mut table = [Block::default(); BLOCKS];
            let table = &mut table[..(stop - first).div_ceil(width)];
            // The union of the rows' intervals of keys, cut at multiples of KEYS.
            let visible = stack.keys(first).start..stack.keys(stop - 1).end;
            // SAFETY: the buffers were taken for this many blocks of these sizes, every `keys` lies inside
            // the axis, the copies have room for KEYS rows, and the rows are the task's.
            unsafe {
                let mut row = first;
                for (x, block) in table.iter_mut().enumerate() {
                    // 3 and 2 vectors rather than 4 and 1: the narrowest tile is the slowest.
                    let uneven = NQ == 4 && (stop - row).div_ceil(I::F32_LANES) == NQ + 1;
                    let count = if uneven { width - I::F32_LANES } else { width };
                    *block = Block { again, ..Block::new(row, count.min(stop - row)) };
                    columns.clear(buffers(x).kept);
                    row += count;
                    if visible.is_empty() {
                        stack.act::<I, NQ, MR>(isa, block, buffers(x), Action::Begin);
                        stack.act::<I, NQ, MR>(isa, block, buffers(x), Action::End(&out));
                    }
                }
                for keys in key_blocks(visible.clone()) {
                    clock.start();
                    let [k, v] = if paired {
                        let (start, head, mut shown) = (keys.start / KEYS * KEYS, [b, hk], u64::MAX);
                        if again {
                            let sees = |bits, key| bits | u64::from(stack.sees(first, key)) << (key - start);
                            shown = keys.clone().fold(0, sees);
                        }
                        let (to_k, to_v) = (kc.as_mut_ptr(), vc.as_mut_ptr());
                        if copy_k {
                            pairs::keys(&call.k, head, &keys, width_k, to_k.cast());
                        }
                        if products == Products::Tiles {
                            pairs::values(isa, &call.v, head, &keys, width_v, shown, to_v.cast());
                            // Rows that `Source::skip` does not move: tiles take whole blocks.
                            [to_k, to_v].map(|ptr| Source { ptr: ptr.cast_const(), row: 0 })
                        } else {
                            pairs::pair_values(isa, &call.v, head, &keys, shown, to_v.cast());
                            let v = Source { ptr: to_v.cast_const(), row: dv as isize };
                            let k = if copy_k {
                                let k = Source { ptr: to_k.cast_const(), row: width_k as isize / 2 };
                                k.skip(keys.start - start)
                            } else {
                                in_place(&call.k, head, keys.start)
                            };
                            [k, v]
                        }
                    } else {
                        let to_v = (copy_v || again).then_some(vc.as_mut_ptr());
                        let v = source(isa, &call.v, &stack, &keys, to_v);
                        if again {
                            for key in keys.clone().filter(|&key| !stack.sees(first, key)) {
                                vc[(key - keys.start) * dv..][..dv].fill(0.0);
                            }
                        }
                        [source(isa, &call.k, &stack, &keys, copy_k.then_some(kc.as_mut_ptr())), v]
                    };
                    clock.lap(Part::Packing);
                    // The first block of rows finds K and V far away and asks for what comes next; in its
                    // first step each block asks for the queries of the next block, in its last for the rows
                    // that it will write right after. Far apart, all rows of a task would not find room in a
                    // cache at a time.
                    let (begin, last) = (keys.start == visible.start, keys.end == visible.end);
                    let follow = if last && stop == rows { after } else { None };
                    let (next_b, next_hk, next_keys) = match follow {
                        None => (b, hk, keys.end..visible.end.min(keys.end + KEYS)),
                        Some(next) => {
                            let start = call.keys(next.b, next.token).start;
                            (next.b, next.hk, start..call.kv_len(next.b).min(start + KEYS))
                        }
                    };
                    // A copy of V has been read already: then it is the next block's that is asked for.
                    let during_scores = if copy_v {
                        lines(&call.v, next_b, next_hk, next_keys.clone())
                    } else {
                        lines(&call.v, b, hk, keys.clone())
                    };
                    let during_values = lines(&call.k, next_b, next_hk, next_keys);
                    let ahead = [[during_scores, Lines::NONE], [during_values, Lines::NONE]];
                    let mut span = Span { keys, k, v, ahead };
                    for (x, block) in table.iter_mut().enumerate() {
                        if last {
                            span.ahead[0][1] = stack.lines_of(block, &out);
                        }
                        let row = block.row + block.count;
                        if call.group == 1 && begin && row < stop {
                            let start = tokens.start + row;
                            span.ahead[1][1] = lines(&call.q, b, hk, start..end.min(start + width));
                        } else if let (1, Some(next), true) = (call.group, follow, row == stop) {
                            let queries = next.token..call.q_len(next.b).min(next.token + width);
                            span.ahead[1][1] = lines(&call.q, next.b, next.hk, queries);
                        }
                        if begin {
                            stack.act::<I, NQ, MR>(isa, block, buffers(x), Action::Begin);
                        }
                        let over = Action::Over { span: &span, goal: Goal::Step };
                        stack.act::<I, NQ, MR>(isa, block, columns.place(buffers(x), span.keys.start), over);
                        if last {
                            stack.act::<I, NQ, MR>(isa, block, buffers(x), Action::End(&out));
                        }
                        span.ahead = [[Lines::NONE; 2]; 2];
                    }
                }
            }
            if !again {
                next = stop;
                for block in table.iter_mut() {
                    while block.leaked != 0 {
                        leaked.push(block.row + block.leaked.trailing_zeros() as usize);
                        block.leaked &= block.leaked - 1;
                    }
                }
            }
        }
        if let (Some(sink), Some(&head)) = (stack.statistics, heads.first()) {
            // SAFETY: as above; what the head's keys receive from this task goes with its rows.
            unsafe { columns.finish(isa, sink.received_from(head)) };
        }
        if products == Products::Tiles {
            // SAFETY: as above.
            unsafe { tiles::end() };
        }
    }
}

impl Call<'_> {
    /// Query rows, tokens times heads of a group, of a task that has no need to be smaller.
    pub fn rows_of_a_task(&self) -> usize {
        ROWS[usize::from(needs_copy(&self.k, 2) || needs_copy(&self.v, 2))]
    }
}

/// Cuts an interval of keys at the multiples of `KEYS`.
#[inline(always)]
pub(crate) fn key_blocks(keys: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut start = keys.start;
    core::iter::from_fn(move || {
        let block = start..keys.end.min((start / KEYS + 1) * KEYS);
        start = block.end;
        (!block.is_empty()).then_some(block)
    })
}

/// Some tokens of Q, K or V, as far as they can be asked for: features side by side, tokens one stride apart.
#[inline(always)]
fn lines(x: &Tensor<'_>, b: usize, head: usize, tokens: Range<usize>) -> Lines {
    if tokens.is_empty() || !x.is_dense() {
        return Lines::NONE;
    }
    let (row, bytes) = (x.strides()[2], x.shape()[3] * x.dtype.size());
    Lines { ptr: x.row(b, head, tokens.start), row, bytes, count: tokens.len().min(x.run(b, tokens.start)) }
}

/// Whether blocks of K or V are copied to compact f32 first: where they must be widened or gathered.
#[inline(always)]
pub(crate) fn needs_copy(x: &Tensor<'_>, blocks: usize) -> bool {
    x.dtype != DType::F32 || is_apart(x, blocks)
}

/// Whether they must be gathered: also where rows lie so far apart that they share cache sets and take a page
/// each, and enough query rows use the copy.
#[inline(always)]
fn is_apart(x: &Tensor<'_>, blocks: usize) -> bool {
    let far = (2 * x.shape()[3] * size_of::<f32>()).max(NEAR);
    let scattered = x.strides()[2].unsigned_abs() > far && blocks >= 2;
    !x.is_dense() || scattered || !x.has_runs_of(KEYS)
}

/// The rows from `key` on where they lie: f32, or pairs of bf16.
#[inline(always)]
fn in_place(x: &Tensor<'_>, [b, hk]: [usize; 2], key: usize) -> Source {
    Source { ptr: x.row(b, hk, key).cast(), row: x.strides()[2] / size_of::<f32>() as isize }
}

/// The rows `keys` of K or V: in place, or copied to `copy`.
///
/// # Safety
/// `keys` must lie inside the axis, `copy` must have room for them and be there if `needs_copy`.
#[inline(always)]
pub(crate) unsafe fn source<I: Isa>(
    isa: I,
    x: &Tensor<'_>,
    stack: &Stack<'_>,
    keys: &Range<usize>,
    copy: Option<*mut f32>,
) -> Source {
    let features = x.shape()[3];
    let Some(copy) = copy else {
        debug_assert!(x.dtype == DType::F32);
        return in_place(x, [stack.b, stack.hk], keys.start);
    };
    let mut key = keys.start;
    while key < keys.end {
        let run = x.run(stack.b, key).min(keys.end - key);
        // SAFETY: the caller's.
        unsafe {
            let to = copy.add((key - keys.start) * features);
            pack::copy(isa, x, [stack.b, stack.hk, key], run, to);
        }
        key += run;
    }
    Source { ptr: copy, row: features as isize }
}
