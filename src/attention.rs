//! The options and the call.

use std::ops::Range;
use std::sync::OnceLock;

use headwise_kernels::{Call, Element, Error, Level, Position, Stage, Stored, Terms, View, ViewMut};

use crate::plan::{Plan, Run, Threads};
use crate::workspace::{Scratches, Workspace};

/// Attention with its options. [`Attention::new`] is plain `softmax(QKᵀ/√D)V`; every method adds one term of
/// the formula at the [crate's top](crate) or says how to run it.
///
/// A key is visible to a query only if causal, window, lengths, mask and bias all let it be.
///
/// ```
/// use headwise::{Attention, Position, View, ViewMut};
/// let (q, k, v) = ([0.0; 2], [0.0; 3], [3.0, 5.0, 7.0]); // equal scores: the mean of the visible values
/// let mut out = [0.0; 2];
/// Attention::new().causal().position(Position::BottomRight).run(
///     View::bhld(&q, [1, 1, 2, 1])?,
///     View::bhld(&k, [1, 1, 3, 1])?,
///     View::bhld(&v, [1, 1, 3, 1])?,
///     ViewMut::bhld(&mut out, [1, 1, 2, 1])?,
/// )?;
/// assert_eq!(out, [4.0, 5.0]); // query 0 stands at key 1, query 1 at key 2
/// # Ok::<(), headwise::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Attention<'a> {
    terms: Terms<'a>,
    level: Option<Level>,
    precision: Precision,
    threads: Threads,
    pub(crate) scratch: Option<&'a Scratches>,
}

/// How bf16 inputs are multiplied. Everything is summed in f32 either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// As fast as the processor can: in prefill at levels with products of bf16 ([`Level::Avx512Bf16`],
    /// [`Level::NeonBf16`], [`Level::Amx`]) the softmax weights are rounded to bf16 for the product with V, which
    /// makes errors of up to 2 units in the last place of the largest outputs, and subnormal inputs count as 0.
    #[default]
    Fast,
    /// In f32: half a unit in the last place. For all other types, and at all other levels, there is no
    /// difference.
    Exact,
}

impl<'a> Attention<'a> {
    /// Plain attention.
    pub fn new() -> Self {
        Self::default()
    }

    /// Attention with the given terms.
    pub fn with_terms(terms: Terms<'a>) -> Self {
        Self { terms, ..Self::default() }
    }

    /// The terms of the formula set so far.
    pub fn terms(&self) -> &Terms<'a> {
        &self.terms
    }

    /// The factor on `<q, k>`; without it `1/sqrt(D)`. Zero and negative numbers are used as given.
    pub fn scale(mut self, scale: f32) -> Self {
        self.terms.scale = Some(scale);
        self
    }

    /// Caps the scaled scores smoothly: `cap * tanh(x / cap)`.
    pub fn softcap(mut self, cap: f32) -> Self {
        self.terms.softcap = Some(cap);
        self
    }

    /// Hides the keys behind the query: only `j <= pos(i)` is visible.
    pub fn causal(mut self) -> Self {
        self.terms.causal = true;
        self
    }

    /// Hides the keys far from the query: only `pos(i) - left <= j <= pos(i) + right` is visible; `None`
    /// leaves that side open. "The last W keys, self included" is `left = W - 1` with `right = 0`.
    pub fn window(mut self, left: Option<usize>, right: Option<usize>) -> Self {
        (self.terms.left, self.terms.right) = (left, right);
        self
    }

    /// Where query `i` stands among the keys, for causal, window and slopes; by default the last valid query
    /// stands at the last valid key.
    pub fn position(mut self, position: Position<'a>) -> Self {
        self.terms.position = position;
        self
    }

    /// A boolean mask, true = attend, of any shape that broadcasts to `[B, Hq, Lq, Lk]`. It is read in place.
    pub fn mask(mut self, mask: View<'a, bool>) -> Self {
        self.terms.mask = Some(mask);
        self
    }

    /// A bias added to the scaled and capped scores, of any shape that broadcasts to `[B, Hq, Lq, Lk]`;
    /// `-inf` hides the pair like the mask. It is read in place and never scaled.
    pub fn bias(mut self, bias: View<'a, f32>) -> Self {
        self.terms.bias = Some(bias);
        self
    }

    /// The number of valid keys of each batch entry (`[B]`); what lies behind is never read.
    pub fn kv_lens(mut self, lens: &'a [usize]) -> Self {
        self.terms.kv_lens = Some(lens);
        self
    }

    /// The number of valid queries of each batch entry (`[B]`); rows behind come out as zeros.
    pub fn q_lens(mut self, lens: &'a [usize]) -> Self {
        self.terms.q_lens = Some(lens);
        self
    }

    /// ALiBi slopes (`[Hq]`): `slope * |pos(i) - j|` is subtracted from the scores. See [`alibi_slopes`].
    pub fn slopes(mut self, slopes: &'a [f32]) -> Self {
        self.terms.slopes = Some(slopes);
        self
    }

    /// Sink logits (`[Hq]`): they take part in the denominator, and in `lse`, as a key without a value.
    pub fn sinks(mut self, sinks: &'a [f32]) -> Self {
        self.terms.sinks = Some(sinks);
        self
    }

    /// Factors on each head's output (`[Hq]`). A head whose gate is exactly 0 costs nothing: its output is 0,
    /// its `lse` -inf.
    pub fn gates(mut self, gates: &'a [f32]) -> Self {
        self.terms.gates = Some(gates);
        self
    }

    /// Forces an instruction set. Without it the environment variable `HEADWISE_LEVEL` decides, and without
    /// that the processor.
    pub fn level(mut self, level: Level) -> Self {
        self.level = Some(level);
        self
    }

    /// The instruction set of calls that force none: that of the environment variable `HEADWISE_LEVEL`, as it
    /// was at the first call, or [`Level::detect`].
    ///
    /// # Errors
    /// [`Error::UnknownLevel`], [`Error::LevelUnavailable`].
    pub fn default_level() -> Result<Level, Error> {
        resolve_level(None)
    }

    /// How bf16 inputs are multiplied; by default [`Precision::Fast`].
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Computes on the calling thread alone. Without it the current rayon pool is used: the global one, or
    /// the one whose `install` the call runs in. The result is the same to the bit. Calls of less than about
    /// 50 µs stay on the calling thread anyway.
    ///
    /// ```
    /// # use headwise::{Attention, View, ViewMut};
    /// # let (x, mut out) = ([1.0; 8], [0.0; 8]);
    /// # let x = View::bhld(&x, [1, 1, 2, 4])?;
    /// let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build()?;
    /// let out = ViewMut::bhld(&mut out, [1, 1, 2, 4])?;
    /// pool.install(|| Attention::new().run(x, x, x, out))?; // on this pool's threads, and no others
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn sequential(mut self) -> Self {
        self.threads = Threads::Calling;
        self
    }

    /// Computes in memory of the caller's, which one call after another can use, or several at a time.
    /// Without it the memory stays with each thread that computes. A layer uses the workspace that it is
    /// given itself.
    pub fn workspace(self, workspace: &'a Workspace) -> Self {
        self.scratch(&workspace.scratch)
    }

    /// The same for a part of it.
    pub(crate) fn scratch(mut self, scratch: &'a Scratches) -> Self {
        self.scratch = Some(scratch);
        self
    }

    /// Computes the attention of `q [B, Hq, Lq, D]` over `k [B, Hk, Lk, D]` and `v [B, Hk, Lk, Dv]` into `out
    /// [B, Hq, Lq, Dv]`. Rows that see no key come out as zeros. Packed queries ask for an output packed
    /// alike; keys and values may be packed, paged or rolling, both with the same lengths, and of another
    /// type: a cache in half precision, or of integers with scales ([`View::scaled`]). The arithmetic is f32.
    ///
    /// # Errors
    /// Every argument is checked before any work; the error names the one at fault and its numbers.
    pub fn run<T: Element, C: Stored>(
        &self,
        q: View<'a, T>,
        k: View<'a, C>,
        v: View<'a, C>,
        out: ViewMut<'_, T>,
    ) -> Result<(), Error> {
        self.compute(q, k, v, out, None)
    }

    /// As [`Attention::run`], and writes `lse`, compact `[B, Hq, Lq]` (of packed queries `[Hq, tokens]`, up
    /// to the end of the last sequence): the natural logarithm of each row's softmax denominator, -inf where
    /// a row sees nothing.
    ///
    /// # Errors
    /// As [`Attention::run`]; [`Error::Length`] if `lse` does not have `B * Hq * Lq` entries.
    pub fn run_with_lse<T: Element, C: Stored>(
        &self,
        q: View<'a, T>,
        k: View<'a, C>,
        v: View<'a, C>,
        out: ViewMut<'_, T>,
        lse: &mut [f32],
    ) -> Result<(), Error> {
        self.compute(q, k, v, out, Some(lse))
    }

    /// The attention map: the scores of query heads `heads` and queries `queries` against every key, up to
    /// `stage` of the formula, into `out`, compact `[B, heads.len(), queries.len(), Lk]`. Hidden pairs, and
    /// rows behind `q_lens` or behind a gate of 0, are -inf (weights: 0). Nothing else is materialised.
    ///
    /// ```
    /// use headwise::{Attention, Stage, View};
    /// let (q, k) = ([0.0; 3], [0.0; 3]);
    /// let mut weights = [0.0; 3];
    /// let (q, k) = (View::bhld(&q, [1, 1, 3, 1])?, View::bhld(&k, [1, 1, 3, 1])?);
    /// Attention::new().causal().scores(Stage::Weights, q, k, 0..1, 1..2, &mut weights)?;
    /// assert_eq!(weights, [0.5, 0.5, 0.0]); // query 1 sees keys 0 and 1
    /// # Ok::<(), headwise::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Attention::run`]; [`Error::Range`] if heads or queries reach beyond their axes;
    /// [`Error::Length`] if `out` does not have the size named above.
    pub fn scores<T: Element, C: Stored>(
        &self,
        stage: Stage,
        q: View<'a, T>,
        k: View<'a, C>,
        heads: Range<usize>,
        queries: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let call = Call::new(q, k, k.first_features(0), &self.terms)?;
        self.plan_of(&call)?.run_scores(&call, stage, heads, queries, out, self.scratch)
    }

    /// What [`Attention::run`] would do with these arguments: the kernel, the tile, the split of the work.
    ///
    /// # Errors
    /// As [`Attention::run`].
    pub fn plan<T: Element, C: Stored>(
        &self,
        q: View<'a, T>,
        k: View<'a, C>,
        v: View<'a, C>,
    ) -> Result<Plan, Error> {
        self.plan_of(&Call::new(q, k, v, &self.terms)?)
    }

    fn compute<T: Element, C: Stored>(
        &self,
        q: View<'a, T>,
        k: View<'a, C>,
        v: View<'a, C>,
        out: ViewMut<'_, T>,
        lse: Option<&mut [f32]>,
    ) -> Result<(), Error> {
        let call = Call::new(q, k, v, &self.terms)?;
        let level = self.resolve_level(&call)?;
        if lse.is_none() && out.shape() == call.out_shape() && out.shape().contains(&0) {
            return Ok(()); // nothing to write, however much there would be to compute
        }
        Plan::new(&call, level, self.threads)?.run(&call, out, lse, self.scratch)
    }

    /// The level, if this processor has it. What products of bf16 are of no use for is computed without.
    fn resolve_level(&self, call: &Call<'_>) -> Result<Level, Error> {
        let level = resolve_level(self.level)?;
        let fast = call.is_bf16() && self.precision == Precision::Fast;
        Ok(if fast { level } else { level.exact() })
    }

    /// The options for some query heads of a call with weights `[B, Hq, Lq, Lk]`.
    ///
    /// # Errors
    /// [`Error::Length`] or [`Error::Broadcast`] if what is given for each head does not fit the whole call.
    pub(crate) fn of_heads(mut self, heads: &Range<usize>, weights: [usize; 4]) -> Result<Self, Error> {
        let expected = weights[1];
        let Terms { slopes, sinks, gates, mask, bias, .. } = &mut self.terms;
        for (argument, each) in [("slopes", slopes), ("sinks", sinks), ("gates", gates)] {
            match *each {
                Some(given) if given.len() != expected => {
                    return Err(Error::Length { argument, got: given.len(), expected });
                }
                Some(given) => *each = Some(&given[heads.clone()]),
                None => {}
            }
        }
        *mask = mask.map(|mask| of_heads("mask", mask, heads, weights)).transpose()?;
        *bias = bias.map(|bias| of_heads("bias", bias, heads, weights)).transpose()?;
        Ok(self)
    }

    /// Runs on this.
    pub(crate) fn on(mut self, run: Run) -> Self {
        (self.level, self.threads) = (run.level, run.threads);
        self
    }

    /// How a call is computed.
    pub(crate) fn plan_of(&self, call: &Call<'_>) -> Result<Plan, Error> {
        Plan::new(call, self.resolve_level(call)?, self.threads)
    }

    /// What it runs on.
    pub(crate) fn runs_on(&self) -> Run {
        Run { level: self.level, threads: self.threads }
    }
}

/// The part of a mask or bias that is for some heads.
fn of_heads<'a, T>(
    argument: &'static str,
    view: View<'a, T>,
    heads: &Range<usize>,
    to: [usize; 4],
) -> Result<View<'a, T>, Error> {
    match view.shape()[1] {
        1 => Ok(view),
        n if n == to[1] => view.heads(heads.clone()),
        _ => Err(Error::Broadcast { argument, got: view.shape(), to }),
    }
}

/// The level asked for, or by `HEADWISE_LEVEL`, or the best one.
pub(crate) fn resolve_level(level: Option<Level>) -> Result<Level, Error> {
    static FROM_ENVIRONMENT: OnceLock<Result<Level, Error>> = OnceLock::new();
    let level = match level {
        Some(level) => level,
        None => FROM_ENVIRONMENT
            .get_or_init(|| match std::env::var("HEADWISE_LEVEL") {
                Ok(name) if !name.is_empty() => name.parse(),
                _ => Ok(Level::detect()),
            })
            .clone()?,
    };
    if level.is_available() { Ok(level) } else { Err(Error::LevelUnavailable { level }) }
}

/// The published ALiBi slopes for any number of query heads (Press, Smith and Lewis 2022, "Train Short, Test
/// Long", section 3, and the rule of its code for other numbers): `2^(-8 i / n)` for `i = 1..=n` where `n` is
/// a power of two; else those of the power of two below, then every second one of the power of two above.
///
/// ```
/// assert_eq!(headwise::alibi_slopes(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]);
/// ```
pub fn alibi_slopes(heads: usize) -> Vec<f32> {
    let series = |n: usize| (1..=n).map(move |i| (-8.0 * i as f64 / n as f64).exp2() as f32);
    match heads.checked_ilog2() {
        None => Vec::new(),
        Some(log) => {
            let below = 1 << log;
            series(below).chain(series(2 * below).step_by(2)).take(heads).collect()
        }
    }
}
