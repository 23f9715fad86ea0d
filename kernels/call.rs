//! The door: a `Call` is one attention problem whose arguments have been checked. What passes here is sound
//! to compute with unsafe code; `split.rs` cuts it into tasks.

use core::ops::Range;

use crate::element::{Element, Stored};
use crate::tensor::Tensor;
use crate::view::count;
use crate::{DType, Error, View};

/// Where query `i` stands among the keys: `pos(i) = i + offset`. Causal, window and ALiBi all measure from
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Position<'a> {
    /// Offset 0: the first query stands at the first key (PyTorch's `is_causal`, ONNX without a cache).
    TopLeft,
    /// Offset `kv_len(b) - q_len(b)`: the last query stands at the last key (decoding with a cache).
    #[default]
    BottomRight,
    /// The same offset for every batch entry; it may be negative.
    At(i64),
    /// One offset per batch entry.
    Each(&'a [i64]),
}

/// All terms of the formula but Q, K and V. [`Terms::default`] is plain `softmax(QKᵀ/√D)V`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Terms<'a> {
    /// Factor on `<q, k>`; `None` is `1/sqrt(D)`. Zero and negative numbers are used as given.
    pub scale: Option<f32>,
    /// `softcap * tanh(x / softcap)` on the scaled scores.
    pub softcap: Option<f32>,
    /// Key `j` is visible to query `i` only if `j <= pos(i)`.
    pub causal: bool,
    /// Key `j` is visible to query `i` only if `pos(i) - left <= j`.
    pub left: Option<usize>,
    /// Key `j` is visible to query `i` only if `j <= pos(i) + right`.
    pub right: Option<usize>,
    /// Where the queries stand.
    pub position: Position<'a>,
    /// True = attend. Broadcasts to `[B, Hq, Lq, Lk]`.
    pub mask: Option<View<'a, bool>>,
    /// Added to the scaled and capped scores; `-inf` hides like the mask. Broadcasts to `[B, Hq, Lq, Lk]`.
    pub bias: Option<View<'a, f32>>,
    /// Valid keys of each batch entry; what lies behind is never read.
    pub kv_lens: Option<&'a [usize]>,
    /// Valid queries of each batch entry; rows behind come out as zeros.
    pub q_lens: Option<&'a [usize]>,
    /// ALiBi slopes, one per query head: `-slope * |pos(i) - j|`.
    pub slopes: Option<&'a [f32]>,
    /// Sink logits, one per query head, in the denominator only.
    pub sinks: Option<&'a [f32]>,
    /// Factors on the output, one per query head; a head whose gate is 0 costs nothing.
    pub gates: Option<&'a [f32]>,
}

/// How far along the formula scores are taken: see [`Call::split_scores`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// `scale * <q, k>`.
    Scaled,
    /// After the cap.
    Capped,
    /// After bias and slopes: the logits.
    Biased,
    /// After softmax, without the gate.
    Weights,
}

/// What an exp costs, in multiply-adds.
const EXP: usize = 16;

/// What reading an element of K or V costs once, in multiply-adds: with one query that is most of all.
const READ: usize = 4;

/// One checked attention problem.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    pub(crate) q: Tensor<'a>,
    pub(crate) k: Tensor<'a>,
    pub(crate) v: Tensor<'a>,
    pub(crate) terms: Terms<'a>,
    pub(crate) scale: f32,
    /// Query heads on one key/value head.
    pub(crate) group: usize,
}

impl<'a> Call<'a> {
    /// Checks every argument against the others. Shapes: `q [B, Hq, Lq, D]`, `k [B, Hk, Lk, D]`,
    /// `v [B, Hk, Lk, Dv]`.
    ///
    /// # Errors
    /// Names the first argument that does not fit.
    pub fn new<T: Element, C: Stored>(
        q: View<'a, T>,
        k: View<'a, C>,
        v: View<'a, C>,
        terms: &Terms<'a>,
    ) -> Result<Self, Error> {
        Self::of(Tensor::new(q), Tensor::new(k), Tensor::new(v), *terms)
    }

    /// As [`Call::new`].
    fn of(q: Tensor<'a>, k: Tensor<'a>, v: Tensor<'a>, mut terms: Terms<'a>) -> Result<Self, Error> {
        let [b, hq, lq, d] = q.shape();
        let [_, hk, lk, _] = k.shape();
        expect("k", k.shape(), [b, hk, lk, d])?;
        expect("v", v.shape(), [b, hk, lk, v.shape()[3]])?;
        for (argument, tensor) in [("k", &k), ("v", &v)] {
            if tensor.dtype == DType::I8 && !tensor.is_scaled() {
                return Err(Error::NoScales { argument });
            }
        }
        if (hk == 0 && hq > 0) || (hk > 0 && !hq.is_multiple_of(hk)) {
            return Err(Error::Heads { query: hq, key: hk });
        }
        let scores = [b, hq, lq, lk];
        count(scores).ok_or(Error::TooLarge { argument: "scores", shape: scores })?;
        // Also where an axis that these do not have is 0.
        let rows = [b, hq.max(hk), lq, 1];
        count(rows).ok_or(Error::TooLarge { argument: "rows", shape: rows })?;
        if let Some(&tokens) = q.starts().and_then(<[usize]>::last) {
            let rows = [1, hq, tokens, 1];
            count(rows).ok_or(Error::TooLarge { argument: "rows", shape: rows })?;
        }
        let out = [b, hq, lq, v.shape()[3]];
        count(out).ok_or(Error::TooLarge { argument: "out", shape: out })?;

        if !(k.is_strided() && v.is_strided()) {
            (0..b).try_for_each(|b| tokens("v", b, v.len(b), k.len(b)))?;
        }

        let scale = match terms.scale {
            Some(scale) if scale.is_finite() => scale,
            Some(got) => return Err(Error::Value { argument: "scale", got, must: "finite" }),
            None if d == 0 => return Err(Error::NoDefaultScale),
            None => 1.0 / (d as f32).sqrt(),
        };
        if let Some(got) = terms.softcap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
            return Err(Error::Value { argument: "softcap", got, must: "finite and above 0" });
        }
        lengths("kv_lens", terms.kv_lens, b, |b| k.len(b))?;
        lengths("q_lens", terms.q_lens, b, |b| q.len(b))?;
        if let Position::Each(offsets) = terms.position {
            length("offsets", offsets.len(), b)?;
        }
        for (argument, per_head) in [("slopes", terms.slopes), ("sinks", terms.sinks), ("gates", terms.gates)]
        {
            per_head.map_or(Ok(()), |x| length(argument, x.len(), hq))?;
        }
        if let Some(mask) = terms.mask {
            terms.mask = Some(broadcast("mask", mask, scores)?);
        }
        if let Some(bias) = terms.bias {
            terms.bias = Some(broadcast("bias", bias, scores)?);
        }
        Ok(Self { q, k, v, terms, scale, group: hq.checked_div(hk).unwrap_or(0) })
    }

    /// The number of query rows, `B * Hq * Lq`, or of packed queries `Hq` times all of their tokens.
    pub fn rows(&self) -> usize {
        let [b, hq, lq, _] = self.q.shape();
        match self.q.starts() {
            Some(starts) => hq * starts.last().unwrap_or(&0),
            None => count([b, hq, lq, 1]).unwrap_or(0), // it fits: `Call::new`
        }
    }

    /// `[B, Hq, Lq, Dv]`, the shape of the output.
    pub fn out_shape(&self) -> [usize; 4] {
        let [b, hq, lq, _] = self.q.shape();
        [b, hq, lq, self.v.shape()[3]]
    }

    /// The types of Q (and the output) and of K and V.
    pub fn dtypes(&self) -> [DType; 2] {
        [self.q.dtype, self.k.dtype]
    }

    /// Keys, valid or not: the size of their axis.
    pub fn keys_axis(&self) -> usize {
        self.k.shape()[2]
    }

    /// Key/value heads.
    pub fn kv_heads(&self) -> usize {
        self.k.shape()[1]
    }

    /// Features of a query or key.
    pub fn features(&self) -> usize {
        self.q.shape()[3]
    }

    /// The terms, mask and bias as broadcast.
    pub fn terms(&self) -> &Terms<'a> {
        &self.terms
    }

    /// Query heads on one key/value head.
    pub fn group(&self) -> usize {
        self.group
    }

    /// Multiply-adds, about, of the whole call: `D + Dv`, and an exp, for every pair that causal, window and
    /// lengths leave; and what it takes to read K and V.
    pub fn work(&self) -> usize {
        let [b, hq, lq, d] = self.q.shape();
        if hq == 0 || lq == 0 {
            return 0;
        }
        let pairs = |b| self.pairs(b, 0, self.q_len(b));
        let pairs = (0..b).map(pairs).fold(0, usize::saturating_add);
        let features = d.saturating_add(self.v.shape()[3]);
        let keys = |b| (self.keys(b, 0).start..self.keys(b, self.q_len(b).max(1) - 1).end).len();
        let keys = (0..b).map(keys).fold(0, usize::saturating_add);
        let reads = keys.saturating_mul(self.kv_heads()).saturating_mul(features).saturating_mul(READ);
        let each = features.saturating_add(EXP);
        pairs.saturating_mul(hq).saturating_mul(each).saturating_add(reads)
    }

    /// Visible pairs of queries `start..end`, taking their number to grow evenly from the first to the last.
    pub fn pairs(&self, b: usize, start: usize, end: usize) -> usize {
        if start >= end {
            return 0;
        }
        let (first, last) = (self.keys(b, start), self.keys(b, end - 1));
        (first.len() + last.len()).div_ceil(2).saturating_mul(end - start)
    }

    /// Whether Q, K and V are bf16, whose products some levels compute as such.
    pub fn is_bf16(&self) -> bool {
        self.dtypes() == [DType::Bf16; 2]
    }

    /// The scale as a power of two, which bf16 can be multiplied by exactly, or 0, and the rest.
    pub(crate) fn split_scale(&self) -> [f32; 2] {
        if self.scale == 0.0 {
            return [0.0, 1.0];
        }
        let power = f32::from_bits(self.scale.to_bits() & 0x7f80_0000).max(f32::MIN_POSITIVE);
        [power, self.scale / power]
    }

    /// The factor on `<q, k>` in use.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Valid keys of batch entry `b`.
    pub fn kv_len(&self, b: usize) -> usize {
        self.terms.kv_lens.map_or(self.k.len(b), |lens| lens[b])
    }

    /// Valid queries of batch entry `b`.
    pub fn q_len(&self, b: usize) -> usize {
        self.terms.q_lens.map_or(self.q.len(b), |lens| lens[b])
    }

    /// `pos(i)` of query `i` in batch entry `b`.
    pub fn pos(&self, b: usize, i: usize) -> i64 {
        let offset = match self.terms.position {
            Position::TopLeft => 0,
            Position::BottomRight => self.kv_len(b) as i64 - self.q_len(b) as i64,
            Position::At(offset) => offset,
            Position::Each(offsets) => offsets[b],
        };
        (i as i64).saturating_add(offset)
    }

    /// The keys that causal, window and lengths leave to query `i`: an interval, empty as `0..0` or `n..m`
    /// with `m <= n`. Both ends grow with `i`.
    pub(crate) fn keys(&self, b: usize, i: usize) -> Range<usize> {
        let (pos, len) = (self.pos(b, i), self.kv_len(b));
        let clamp = |x: i64| usize::try_from(x.max(0)).unwrap_or(usize::MAX).min(len);
        let side = |w: usize| i64::try_from(w).unwrap_or(i64::MAX);
        let start = self.terms.left.map_or(0, |w| clamp(pos.saturating_sub(side(w))));
        let right = match (self.terms.causal, self.terms.right) {
            (true, _) => Some(0), // `right` is not negative, so causal is the narrower of the two
            (false, right) => right,
        };
        let end = right.map_or(len, |w| clamp(pos.saturating_add(side(w)).saturating_add(1)));
        start..end
    }

    /// The query heads on a key/value head.
    pub(crate) fn heads_of(&self, hk: usize) -> Range<usize> {
        hk * self.group..(hk + 1) * self.group
    }

    /// Those of some query heads whose gate is not 0: the others are not computed.
    pub(crate) fn open(&self, heads: Range<usize>) -> impl Iterator<Item = usize> {
        heads.filter(|&head| !self.is_closed(head))
    }

    /// Whether the gate of a query head is 0.
    pub(crate) fn is_closed(&self, head: usize) -> bool {
        self.terms.gates.is_some_and(|gates| gates[head] == 0.0)
    }

    pub(crate) fn is_masked(&self) -> bool {
        self.terms.mask.is_some() || self.terms.bias.is_some()
    }

    /// Place of a row in a compact `[B, Hq, Lq]`, or `[Hq, tokens]` of packed queries.
    #[inline(always)]
    pub fn row_index(&self, b: usize, head: usize, token: usize) -> usize {
        let [_, hq, lq, _] = self.q.shape();
        match self.q.starts() {
            Some(starts) => head * starts[starts.len() - 1] + starts[b] + token,
            None => (b * hq + head) * lq + token,
        }
    }
}

pub(crate) fn expect(argument: &'static str, got: [usize; 4], expected: [usize; 4]) -> Result<(), Error> {
    if got == expected { Ok(()) } else { Err(Error::Shape { argument, got, expected }) }
}

pub(crate) fn length(argument: &'static str, got: usize, expected: usize) -> Result<(), Error> {
    if got == expected { Ok(()) } else { Err(Error::Length { argument, got, expected }) }
}

pub(crate) fn tokens(argument: &'static str, b: usize, got: usize, expected: usize) -> Result<(), Error> {
    if got == expected { Ok(()) } else { Err(Error::Tokens { argument, b, got, expected }) }
}

fn lengths(
    argument: &'static str,
    lens: Option<&[usize]>,
    b: usize,
    axis: impl Fn(usize) -> usize,
) -> Result<(), Error> {
    let Some(lens) = lens else { return Ok(()) };
    length(argument, lens.len(), b)?;
    match (0..b).find(|&b| lens[b] > axis(b)) {
        Some(index) => Err(Error::BeyondAxis { argument, index, got: lens[index], axis: axis(index) }),
        None => Ok(()),
    }
}

fn broadcast<'a, T>(argument: &'static str, view: View<'a, T>, to: [usize; 4]) -> Result<View<'a, T>, Error> {
    view.broadcast(to).filter(View::is_strided).ok_or(Error::Broadcast { argument, got: view.shape(), to })
}
