//! The attention map: the scores of some rows, at a stage of the formula, written out. One block of rows at a
//! time, with the same tiles and terms as the fused kernel; weights take a first pass for maximum and sum.

use core::ops::Range;

use crate::block::{Action, Block, Buffers, Goal, Span, Stack};
use crate::call::Stage;
use crate::exp::LOG4_E;
use crate::isa::Isa;
use crate::level::Op;
use crate::pack::{MAX_ROWS, unpack};
use crate::prefill::{KEYS, key_blocks, needs_copy, source};
use crate::products::{Products, divide, shift};
use crate::scratch::Scratch;
use crate::split::{RowsMut, ScoresTask};
use crate::tile::Lines;

/// Writes the scores of a task's rows.
pub(crate) struct Map<'t, 'a> {
    pub task: ScoresTask<'a>,
    pub scratch: &'t mut Scratch,
}

impl Op for Map<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa, const NQ: usize, const MR: usize>(self, isa: I) {
        let ScoresTask { call, b, hk, tokens, heads: wanted, stage, out } = self.task;
        let (d, lk) = (call.q.shape()[3], call.k.shape()[2]);
        let (memory, heads, _, clock) = self.scratch.parts();
        let end = tokens.end.min(call.q_len(b)).max(tokens.start);
        let empty = if stage == Stage::Weights { 0.0 } else { f32::NEG_INFINITY };
        heads.clear();
        for head in wanted {
            if !call.is_closed(head) {
                heads.push(head);
            }
            for token in tokens.clone() {
                // SAFETY: a row of this task, Lk long. What is visible is overwritten below.
                unsafe {
                    core::slice::from_raw_parts_mut(out.row(b, head, token).cast::<f32>(), lk).fill(empty)
                };
            }
        }
        let (part, unit) = (core::ptr::null_mut(), if stage == Stage::Weights { LOG4_E } else { 1.0 });
        let (token, all, products, statistics) = (tokens.start, 0..lk, Products::MultiplyAdds, None);
        let stack = Stack { call, b, hk, heads, token, span: all, part, products, unit, statistics, clock };
        let rows = (end - tokens.start) * heads.len();
        let width = NQ * I::F32_LANES;
        let copy = needs_copy(&call.k, 1);
        let [qt, ml, st, kc] =
            Scratch::take(memory, [d * width, 2 * width, KEYS * width, if copy { KEYS * d } else { 0 }]);
        let buffers = Buffers::<I::f32s> {
            qt: qt.as_mut_ptr().cast(),
            ot: core::ptr::null_mut(), // no values: Dv is 0
            ml: ml.as_mut_ptr().cast(),
            st: st.as_mut_ptr().cast(),
            sums: core::ptr::null_mut(),
            kept: core::ptr::null_mut(),
        };
        for row in (0..rows).step_by(width) {
            let mut block = Block::new(row, width.min(rows - row));
            let visible = stack.keys(row).start..stack.keys(row + block.count - 1).end;
            // SAFETY: the buffers were taken for these sizes, `keys` lies inside the axis, the rows are the
            // task's.
            unsafe {
                stack.act::<I, NQ, MR>(isa, &mut block, buffers, Action::Begin);
                let copy = if copy { Some(kc.as_mut_ptr()) } else { None };
                if stage == Stage::Weights {
                    for keys in key_blocks(visible.clone()) {
                        let span = span(isa, &stack, keys, copy);
                        stack.act::<I, NQ, MR>(
                            isa,
                            &mut block,
                            buffers,
                            Action::Over { span: &span, goal: Goal::Step },
                        );
                    }
                }
                for keys in key_blocks(visible) {
                    let (span, goal) = (span(isa, &stack, keys, copy), Goal::Write { stage, out: &out });
                    let write = Action::Over { span: &span, goal };
                    stack.act::<I, NQ, MR>(isa, &mut block, buffers, write);
                }
            }
        }
    }
}

/// Some keys without values.
///
/// # Safety
/// As for [`source`].
#[inline(always)]
unsafe fn span<I: Isa>(isa: I, stack: &Stack<'_>, keys: Range<usize>, copy: Option<*mut f32>) -> Span {
    // SAFETY: the caller's.
    let k = unsafe { source(isa, &stack.call.k, stack, &keys, copy) };
    Span { keys, k, v: k, ahead: [[Lines::NONE; 2]; 2] }
}

impl Stack<'_> {
    /// Writes the block's scores over the keys `seen`.
    ///
    /// # Safety
    /// As for [`Stack::act`].
    #[inline(always)]
    pub(crate) unsafe fn write<I: Isa, const NQ: usize>(
        &self,
        isa: I,
        block: &Block,
        buffers: Buffers<I::f32s>,
        seen: Range<usize>,
        stage: Stage,
        out: &RowsMut<'_>,
    ) {
        // SAFETY: the caller's.
        unsafe {
            let mut factor = [isa.splat_f32s(1.0); NQ];
            if stage == Stage::Weights {
                let [m, l] = *buffers.ml.cast::<[[I::f32s; NQ]; 2]>();
                let shift = shift(isa, m);
                for x in 0..seen.len() * NQ {
                    let st = &mut *buffers.st.add(x);
                    *st = isa.power_of_4(isa.sub_f32s(*st, shift[x % NQ]));
                }
                factor = divide(isa, factor, l);
            }
            let rows = self.rows(block);
            let mut place = [core::ptr::null_mut(); MAX_ROWS];
            rows.each(block.count, |i, head, token| {
                place[i] = out.row(self.b, head, token).wrapping_add(seen.start * size_of::<f32>());
            });
            let stride = size_of::<f32>() as isize;
            unpack::<I, f32, NQ>(isa, buffers.st, factor, &place[..block.count], stride, seen.len());
        }
    }
}
