//! What each key receives from all rows of a head:
//!
//! ```text
//! received[j] = sum over i of p(i, j) = sum over i of 4^(s(i, j) - m(i)) / l(i)      as in `prefill.rs`
//! ```
//!
//! Maximum and sum of every row must be known, so the scores are computed a second time, by the same tile. A
//! task owns its keys: for each of them it keeps a vector of sums over the row blocks, whose lanes are added
//! at the end. So no two tasks add to one place, and the sums do not depend on the threads.

use core::ops::Range;

use crate::Call;
use crate::block::{Action, Block, Buffers, Goal, Span, Stack};
use crate::exp::LOG4_E;
use crate::isa::Isa;
use crate::level::Op;
use crate::prefill::{KEYS, key_blocks, needs_copy, source};
use crate::products::{Products, Source, divide, shift};
use crate::scratch::Scratch;
use crate::tile::Lines;

/// Keys of a task: so many that packing the queries for them does not matter, as long as a copy of them stays
/// in the second-level cache.
pub(crate) fn keys(features: usize) -> usize {
    ((64 << 10) / features.max(1) / KEYS * KEYS).clamp(KEYS, 8 * KEYS)
}

/// Sums what some keys receive.
pub(crate) struct Received<'t, 'a> {
    pub call: &'a Call<'a>,
    pub b: usize,
    pub head: usize,
    /// Of the axis, valid or not.
    pub keys: Range<usize>,
    /// Maximum and sum of all rows.
    pub states: &'a [[f32; 2]],
    /// Of this head, one number a key: those of `keys` are the task's.
    pub out: *mut f32,
    pub scratch: &'t mut Scratch,
}

/// Where the weights of a block of rows are added up.
pub(crate) struct Columns<'a> {
    states: &'a [[f32; 2]],
    /// A vector for each key from `first` on.
    sums: *mut f32,
    first: usize,
}

impl Op for Received<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa, const NQ: usize, const MR: usize>(self, isa: I) {
        let Self { call, b, head, keys, states, out, scratch } = self;
        let (memory, heads, _, clock) = scratch.parts();
        heads.clear();
        heads.push(head);
        let (hk, part, span) = (head / call.group, core::ptr::null_mut(), keys.start..keys.end);
        let (token, products, statistics, unit) = (0, Products::MultiplyAdds, None, LOG4_E);
        let stack = Stack { call, b, hk, heads, token, span, part, products, unit, statistics, clock };
        let rows = if call.is_closed(head) { 0 } else { call.q_len(b) };
        let (d, width, lanes) = (call.q.shape()[3], NQ * I::F32_LANES, I::F32_LANES);
        let copy = needs_copy(&call.k, 2);
        let [qt, ml, st, kc, sums] = Scratch::take(
            memory,
            [d * width, 2 * width, KEYS * width, if copy { keys.len() * d } else { 0 }, keys.len() * lanes],
        );
        sums.fill(0.0);
        let buffers = Buffers::<I::f32s> {
            qt: qt.as_mut_ptr().cast(),
            ot: core::ptr::null_mut(), // values are not read
            ml: ml.as_mut_ptr().cast(),
            st: st.as_mut_ptr().cast(),
            sums: core::ptr::null_mut(),
        };
        let valid = keys.start..keys.end.min(call.kv_len(b));
        if copy && rows > 0 && !valid.is_empty() {
            // SAFETY: valid keys, and room for all of the task's.
            unsafe { source(isa, &call.k, &stack, &valid, Some(kc.as_mut_ptr())) };
        }
        let columns = Columns { states, sums: sums.as_mut_ptr(), first: keys.start };
        for row in (0..rows).step_by(width) {
            let mut block = Block::new(row, width.min(rows - row));
            let visible = stack.keys(row).start..stack.keys(row + block.count - 1).end;
            if visible.is_empty() {
                continue;
            }
            // SAFETY: the buffers were taken for these sizes, `keys` lies inside the axis.
            unsafe {
                stack.act::<I, NQ, MR>(isa, &mut block, buffers, Action::Begin);
                for some in key_blocks(visible) {
                    let k = if copy {
                        let ptr = kc.as_ptr().wrapping_add((some.start - keys.start) * d);
                        Source { ptr, row: d as isize }
                    } else {
                        source(isa, &call.k, &stack, &some, None)
                    };
                    let span = Span { keys: some, k, v: k, ahead: [[Lines::NONE; 2]; 2] };
                    let receive = Action::Over { span: &span, goal: Goal::Receive(&columns) };
                    stack.act::<I, NQ, MR>(isa, &mut block, buffers, receive);
                }
            }
        }
        for (key, sums) in keys.zip(sums.chunks_exact(lanes)) {
            // SAFETY: a key of the task.
            unsafe { *out.add(key) = sums.iter().sum() };
        }
    }
}

impl Stack<'_> {
    /// Adds the block's weights over the keys `seen`.
    ///
    /// # Safety
    /// As for [`Stack::act`]; the columns must have a vector for each key.
    #[inline(always)]
    pub(crate) unsafe fn receive<I: Isa, const NQ: usize>(
        &self,
        isa: I,
        block: &Block,
        buffers: Buffers<I::f32s>,
        seen: Range<usize>,
        columns: &Columns<'_>,
    ) {
        let rows = self.rows(block);
        // Lanes past the rows repeat the last one, and weigh nothing.
        let [mut m, mut l] = [[isa.splat_f32s(0.0); NQ]; 2];
        let [of_m, of_l] = [&mut m, &mut l].map(|x| x.as_mut_ptr().cast::<f32>());
        rows.each(NQ * I::F32_LANES, |i, head, token| {
            let [m, l] = columns.states[self.call.row_index(self.b, head, token)];
            // SAFETY: both are `NQ * LANES` f32.
            unsafe { (*of_m.add(i), *of_l.add(i)) = (m, if i < block.count { l } else { 0.0 }) };
        });
        let (shift, share) = (shift::<I, NQ>(isa, m), divide(isa, [isa.splat_f32s(1.0); NQ], l));
        let sums = columns.sums.cast::<I::f32s>().wrapping_add(seen.start - columns.first);
        for j in 0..seen.len() {
            // SAFETY: `st` holds the scores of the keys, and each has a vector of sums.
            let mut sum = unsafe { *sums.add(j) };
            for x in 0..NQ {
                // SAFETY: as above.
                let score = unsafe { *buffers.st.add(j * NQ + x) };
                sum = isa.mul_add_e_f32s(isa.power_of_4(isa.sub_f32s(score, shift[x])), share[x], sum);
            }
            // SAFETY: as above.
            unsafe { *sums.add(j) = sum };
        }
    }
}
