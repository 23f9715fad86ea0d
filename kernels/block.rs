//! A block of query rows: packing it, its scores over some keys, one step of the online softmax, writing it
//! out.
//!
//! The rows of a key/value head are stacked token by token, the heads of the group inside: row `r` is token
//! `r / heads`, head `r % heads`. A block of rows is then narrow in tokens, and causal edges are thin.

use core::ops::Range;

use crate::call::{Call, Stage};
use crate::clock::{Clock, Part};
use crate::extra::{Added, Seen};
use crate::isa::Isa;
use crate::pack;
use crate::pairs;
use crate::prefill::KEYS;
use crate::products::{Products, Scores, Source, scale};
use crate::received::Kept;
use crate::split::RowsMut;
use crate::statistics::{self, Sink};
use crate::terms::{self, Rows};
use crate::tile::{self, Feed, Lines};
use crate::tiles;

mod end;
mod step;
mod tiled;

/// The stack of rows that a task works on.
pub(crate) struct Stack<'a> {
    pub call: &'a Call<'a>,
    pub b: usize,
    pub hk: usize,
    /// The query heads of the group that are computed.
    pub heads: &'a [usize],
    /// Token of row 0.
    pub token: usize,
    /// The keys that are computed, of those that are visible.
    pub span: Range<usize>,
    /// Where the records of the head's rows go, or null where the rows themselves are written.
    pub part: *mut f32,
    pub products: Products,
    /// What scores, sinks and all that is added are multiplied by: `LOG4_E` on their way to weights.
    pub unit: f32,
    pub clock: &'a Clock,
    /// Where the statistics of the rows go, if they are asked for.
    pub statistics: Option<Sink<'a>>,
}

/// A block of query rows, at most as wide as the register tile.
#[derive(Clone, Copy, Default)]
pub(crate) struct Block {
    /// First row, and how many.
    pub row: usize,
    pub count: usize,
    /// Nothing has been added yet: `ot` holds garbage.
    pub fresh: bool,
    /// Hidden pairs were computed, if only as products of 0: NaN behind them may have leaked.
    pub hidden: bool,
    /// Bit `i`: row `i` had hidden pairs and came out not finite.
    pub leaked: u64,
    /// It is computed once more, with zeros for what it does not see: nothing leaks.
    pub again: bool,
}

impl Block {
    pub fn new(row: usize, count: usize) -> Self {
        Self { row, count, fresh: true, hidden: false, leaked: 0, again: false }
    }
}

/// The buffers of one block: packed queries, transposed output, maximum and sum, sums for the statistics;
/// the transposed scores, shared by all blocks, or kept with what [`Kept`] says of them.
#[derive(Clone, Copy)]
pub(crate) struct Buffers<V> {
    pub qt: *mut V,
    pub ot: *mut V,
    pub ml: *mut V,
    pub st: *mut V,
    pub sums: *mut V,
    pub kept: *mut Kept,
}

/// What to do with a block.
pub(crate) enum Action<'a> {
    /// Pack the queries and start maximum and sum.
    Begin,
    /// Compute the scores over some keys, for a goal.
    Over { span: &'a Span, goal: Goal<'a> },
    /// Divide by the sums and write the rows.
    End(&'a RowsMut<'a>),
}

/// What the scores over some keys are for.
pub(crate) enum Goal<'a> {
    /// One step of the online softmax.
    Step,
    /// To be written, at a stage; weights need maximum and sum from steps before.
    Write { stage: Stage, out: &'a RowsMut<'a> },
}

/// Some keys, and K and V from the first of them on.
pub(crate) struct Span {
    pub keys: Range<usize>,
    pub k: Source,
    pub v: Source,
    /// What to ask for during the scores, and during the values.
    pub ahead: [[Lines; 2]; 2],
}

impl Span {
    /// What to ask for during the scores, 0, or the values, 1: also of mask and bias, where there is room for it.
    #[inline(always)]
    fn ahead(&self, during: usize, added: Option<&Added>) -> [Lines; 2] {
        let [first, second] = self.ahead[during];
        match added {
            Some(added) if second.count == 0 => [first, added.ahead(during)],
            _ => [first, second],
        }
    }
}

/// Keys or features beside tiles of 1 or 2 vectors, and of 3: enough sums for the multiply-add units not to wait,
/// and no more than there are registers.
const TALL: [usize; 2] = [12, 8];

/// A call of [`Stack::act_at`].
struct Act<'a, I: Isa, const N: usize, const MR: usize> {
    isa: I,
    stack: &'a Stack<'a>,
    block: &'a mut Block,
    buffers: Buffers<I::f32s>,
    action: Action<'a>,
}

impl<I: Isa, const N: usize, const MR: usize> pulp::WithSimd for Act<'_, I, N, MR> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) {
        // SAFETY: made in `Stack::act`, whose caller answers for it.
        unsafe { self.stack.act_at::<I, N, MR>(self.isa, self.block, self.buffers, self.action) };
    }
}

impl Stack<'_> {
    /// Does it, with a tile no wider than the block needs.
    ///
    /// # Safety
    /// The buffers must have been taken for blocks of `NQ` vectors; sources must hold the rows of their keys;
    /// the rows of the block must be among those that `out` is the right to write.
    #[inline(always)]
    pub unsafe fn act<I: Isa, const NQ: usize, const MR: usize>(
        &self,
        isa: I,
        block: &mut Block,
        buffers: Buffers<I::f32s>,
        action: Action<'_>,
    ) {
        // One function for each width, in the instructions of the level: inlined at every call they would be
        // many times the code.
        if block.count <= I::F32_LANES {
            isa.vectorize(Act::<I, 1, { TALL[0] }> { isa, stack: self, block, buffers, action });
        } else if NQ > 2 && block.count <= 2 * I::F32_LANES {
            isa.vectorize(Act::<I, 2, { TALL[0] }> { isa, stack: self, block, buffers, action });
        } else if NQ == 4 && block.count <= 3 * I::F32_LANES {
            isa.vectorize(Act::<I, 3, { TALL[1] }> { isa, stack: self, block, buffers, action });
        } else {
            isa.vectorize(Act::<I, NQ, MR> { isa, stack: self, block, buffers, action });
        }
    }

    #[inline(always)]
    unsafe fn act_at<I: Isa, const N: usize, const MR: usize>(
        &self,
        isa: I,
        block: &mut Block,
        buffers: Buffers<I::f32s>,
        action: Action<'_>,
    ) {
        // SAFETY: the caller's.
        unsafe {
            match action {
                Action::Begin => {
                    self.clock.start();
                    self.begin::<I, N>(isa, block, buffers);
                    self.clock.lap(Part::Packing);
                }
                Action::End(out) => {
                    self.clock.start();
                    self.end::<I, N>(isa, block, buffers, out);
                    self.clock.lap(Part::Writing);
                }
                Action::Over { span, goal } => {
                    self.clock.start();
                    let stage = if let Goal::Write { stage, .. } = goal { stage } else { Stage::Weights };
                    let mut added = None;
                    let scores = self.scores::<I, N, MR>(isa, block, buffers, span, stage, &mut added);
                    let Some((seen, max)) = scores else { return };
                    match goal {
                        Goal::Step => {
                            self.step::<I, N, MR>(isa, block, buffers, span, seen, max, added.as_ref());
                        }
                        Goal::Write { stage, out } => {
                            self.write::<I, N>(isa, block, buffers, seen, stage, out)
                        }
                    }
                }
            }
        }
    }

    /// Features of a key and of a value as they are multiplied: in whole pairs, or whole tiles.
    #[inline(always)]
    pub fn widths(&self) -> [usize; 2] {
        let (d, dv) = (self.call.q.shape()[3], self.call.v.shape()[3]);
        match self.products {
            Products::MultiplyAdds => [d, dv],
            Products::Dots => [d.next_multiple_of(2).max(2), dv],
            Products::Tiles => {
                [d.next_multiple_of(tiles::STEP).max(tiles::STEP), dv.next_multiple_of(tiles::SIDE)]
            }
        }
    }

    /// Where the scores of some keys begin in `st`: in tiles a key has its place among the keys of a block, for
    /// dots in a pair, so that the sums do not depend on which of them a block of rows sees.
    #[inline(always)]
    fn first_score(&self, seen: &Range<usize>) -> usize {
        match self.products {
            Products::MultiplyAdds => 0,
            Products::Dots => seen.start % 2,
            Products::Tiles => seen.start % KEYS,
        }
    }

    #[inline(always)]
    pub fn token_of(&self, row: usize) -> usize {
        self.token + row / self.heads.len()
    }

    /// The output rows of a block, if they can be asked for.
    #[inline(always)]
    pub fn lines_of(&self, block: &Block, out: &RowsMut<'_>) -> Lines {
        if self.heads.len() > 1 || !out.is_dense() || !self.part.is_null() {
            return Lines::NONE;
        }
        let ptr = out.row(self.b, self.heads[0], self.token_of(block.row)).cast_const();
        let bytes = self.call.v.shape()[3] * out.dtype.size();
        Lines { ptr, row: out.strides[2], bytes, count: block.count }
    }

    /// The interval of keys of a row, in this span. Both ends grow with the row.
    #[inline(always)]
    pub fn keys(&self, row: usize) -> Range<usize> {
        let keys = self.call.keys(self.b, self.token_of(row));
        keys.start.max(self.span.start)..keys.end.min(self.span.end)
    }

    /// Whether a row sees a key, by every rule.
    #[inline(always)]
    pub fn sees(&self, row: usize, key: usize) -> bool {
        let index = [self.b, self.heads[row % self.heads.len()], self.token_of(row), key];
        let terms = &self.call.terms;
        self.keys(row).contains(&key)
            && terms.mask.is_none_or(|mask| mask.get(index) == Some(true))
            && terms.bias.is_none_or(|bias| bias.get(index) != Some(f32::NEG_INFINITY))
    }

    /// Head and token of the rows of a block.
    #[inline(always)]
    pub fn rows(&self, block: &Block) -> Rows<'_> {
        let (head, token) = (block.row % self.heads.len(), self.token_of(block.row));
        Rows { heads: self.heads, head, token, count: block.count }
    }

    /// Packs the queries, scaled, and starts maximum and sum: from the sink, or from nothing.
    ///
    /// # Safety
    /// The buffers must hold blocks of `NQ` vectors.
    #[inline(always)]
    unsafe fn begin<I: Isa, const NQ: usize>(&self, isa: I, block: &Block, buffers: Buffers<I::f32s>) {
        let call = self.call;
        let rows = self.rows(block);
        let q = rows.pointers(&call.q, self.b, NQ * I::F32_LANES);
        // SAFETY: rows of Q; `qt` has room for them, or for pairs of their features.
        unsafe {
            if self.products == Products::MultiplyAdds {
                pack::pack::<I, NQ>(isa, &call.q, &q, call.scale * self.unit, buffers.qt);
            } else {
                let ([power, _], pairs) = (call.split_scale(), self.widths()[0] / 2);
                pairs::pack::<I, NQ>(isa, &call.q, &q, power, buffers.qt, pairs);
            }
        }
        let (mut m, mut l) = ([isa.splat_f32s(f32::NEG_INFINITY); NQ], [isa.splat_f32s(0.0); NQ]);
        if let (Some(sinks), 0) = (call.terms.sinks, self.span.start) {
            let one = |head: usize, _| if sinks[head] == f32::NEG_INFINITY { 0.0 } else { 1.0 };
            (m, l) = (rows.lanes(isa, |head, _| sinks[head] * self.unit), rows.lanes(isa, one));
        }
        // SAFETY: the caller's.
        unsafe {
            *buffers.ml.cast() = [m, l];
            if self.statistics.is_some() {
                statistics::begin::<I, NQ>(isa, self, &rows, buffers);
            }
        }
    }

    /// The keys of `keys` that some row of the block sees by causal, window and lengths, and whether some row
    /// does not see some of them.
    #[inline(always)]
    fn seen(&self, block: &Block, keys: &Range<usize>) -> (Range<usize>, bool) {
        let (first, last) = (self.keys(block.row), self.keys(block.row + block.count - 1));
        let seen = keys.start.max(first.start)..keys.end.min(last.end);
        let edge = seen.start < last.start || first.end < seen.end;
        (seen, edge)
    }

    /// Scores of the block over some keys, up to `stage`, hidden pairs as -inf: fills `st` and returns the
    /// keys it holds and the maximum of each lane; `None` if nothing is visible. `added`, which is `None`
    /// before, becomes mask and bias: in its place, as it is large.
    ///
    /// # Safety
    /// The buffers must hold blocks of `NQ` vectors; the span must hold the rows of its keys.
    #[inline(always)]
    unsafe fn scores<I: Isa, const NQ: usize, const MR: usize>(
        &self,
        isa: I,
        block: &mut Block,
        buffers: Buffers<I::f32s>,
        span: &Span,
        stage: Stage,
        added: &mut Option<Added>,
    ) -> Option<(Range<usize>, [I::f32s; NQ])> {
        let (call, b) = (self.call, self.b);
        let (seen, edge) = self.seen(block, &span.keys);
        if seen.is_empty() {
            return None;
        }
        // Products of bf16 take what lies in one pair or tile, weights of 0 and all.
        block.hidden |= self.products != Products::MultiplyAdds && seen != span.keys;
        let n = seen.len();
        let k = span.k.skip(seen.start - span.keys.start);
        let st = buffers.st.wrapping_add(self.first_score(&seen) * NQ);
        let terms = &call.terms;

        // SAFETY: `st` has room for a block of keys, `qt` for D features; K is the caller's.
        unsafe {
            if call.is_masked() {
                let width = NQ * I::F32_LANES;
                let both = added.insert(Added::new(isa, call, b, &self.rows(block), &seen, width));
                block.hidden |= both.seen != Seen::All;
                if both.seen == Seen::Nothing {
                    return None;
                }
                self.clock.lap(Part::Terms);
            }
            let (d, factor) = (self.widths()[0], call.split_scale()[1] * self.unit);
            let (qt, max) = (buffers.qt, [isa.splat_f32s(f32::NEG_INFINITY); NQ]);
            let added = added.as_ref();
            let ahead = span.ahead(0, added);
            let max = match self.products {
                Products::MultiplyAdds => {
                    let feed = Feed::new(ahead, n, d, MR);
                    let mut scores = Scores::<I, NQ, false> { isa, d, k, qt, st, max, factor, feed };
                    tile::cover::<MR>(n, &mut scores);
                    scores.max
                }
                Products::Dots if I::DOTS => {
                    let (d, feed) = (d / 2, Feed::new(ahead, n, d / 2, MR));
                    let mut scores = Scores::<I, NQ, true> { isa, d, k, qt, st, max, factor, feed };
                    tile::cover::<MR>(n, &mut scores);
                    scores.max
                }
                Products::Dots => unreachable!("dots are for levels that have them"),
                Products::Tiles => {
                    Feed::new(ahead, n, d, MR).all(isa);
                    self.tile_scores::<I, NQ>(span, &seen, buffers);
                    scale::<I, NQ>(isa, st, n, factor)
                }
            };
            self.clock.lap(Part::Scores);
            let plus = added.filter(|added| added.seen == Seen::Some);
            if !(edge || plus.is_some() || terms.softcap.is_some() || terms.slopes.is_some()) {
                return Some((seen, max));
            }
            if let (Some(cap), Stage::Capped | Stage::Biased | Stage::Weights) = (terms.softcap, stage) {
                terms::cap(isa, st, n * NQ, cap * self.unit);
            }
            let logits = matches!(stage, Stage::Biased | Stage::Weights);
            if let (Some(slopes), true) = (terms.slopes, logits) {
                terms::slopes::<I, NQ>(isa, self, &self.rows(block), slopes, st, seen.clone());
            }
            if edge {
                block.hidden = true;
                terms::hide::<I, NQ>(isa, call, b, &self.rows(block), st, seen.clone());
            }
            let max = match plus {
                Some(added) => added.apply::<I, NQ>(isa, st, n, logits.then_some(self.unit)),
                None => terms::max::<I, NQ>(isa, st, n),
            };
            self.clock.lap(Part::Terms);
            Some((seen, max))
        }
    }
}
