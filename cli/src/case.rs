//! One random attention problem: made from a stream of numbers, run at a level, held against the reference.
//!
//! `headwise check`, the tests and the fuzz target share it. A case owns its memory; its views take every
//! kind of stride. Each number drawn has a plain meaning and zeros make the plainest case: shrinking works.

use headwise::{Attention, Error, Level, Position, Terms, View, ViewMut, reference};

/// A tensor in memory: a logical shape over data that may be permuted, padded, reversed or broadcast.
#[derive(Debug, Clone)]
pub struct Tensor<T> {
    data: Vec<T>,
    offset: usize,
    shape: [usize; 4],
    strides: [isize; 4],
}

impl<T: Copy> Tensor<T> {
    /// A tensor full of `empty`, its layout from `draw`. Only one that is read may have axes of stride 0.
    fn laid_out(draw: &mut Draw<'_>, shape: [usize; 4], read: bool, empty: T) -> Self {
        const ORDERS: [[usize; 4]; 6] =
            [[0, 1, 2, 3], [0, 2, 1, 3], [0, 1, 3, 2], [3, 2, 1, 0], [2, 0, 1, 3], [1, 3, 0, 2]];
        let order = ORDERS[draw.below(ORDERS.len())];
        let mut strides = [0isize; 4];
        let (mut reach, mut offset) = (0, 0);
        for &axis in order.iter().rev() {
            if read && draw.below(16) == 1 {
                continue; // broadcast
            }
            let stride = reach + 1 + if draw.below(8) == 1 { 1 + draw.below(20) } else { 0 };
            strides[axis] = stride as isize;
            let far = stride * (shape[axis].max(1) - 1);
            if draw.below(8) == 1 {
                strides[axis] = -strides[axis];
                offset += far;
            }
            reach += far;
        }
        let len = if shape.contains(&0) { 0 } else { reach + 1 };
        Self { data: vec![empty; len], offset: offset.min(len), shape, strides }
    }

    /// Elements out of `draw`.
    fn fill(&mut self, draw: &mut Draw<'_>, mut element: impl FnMut(&mut Draw<'_>) -> T) {
        self.data.iter_mut().for_each(|x| *x = element(draw));
    }

    /// The view.
    pub fn view(&self) -> View<'_, T> {
        View::new(&self.data, self.offset, self.shape, self.strides).expect("made to fit")
    }
}

/// A stream of numbers: bytes of a fuzzer, or a generator with a seed.
pub struct Draw<'a>(pub &'a mut dyn FnMut() -> u32);

impl Draw<'_> {
    /// A number below `n`, or 0.
    pub fn below(&mut self, n: usize) -> usize {
        if n < 2 { 0 } else { (self.0)() as usize % n }
    }

    fn uniform(&mut self) -> f32 {
        (self.0)() as i32 as f32 / (1u32 << 31) as f32
    }

    fn maybe<T>(&mut self, one_in: usize, f: impl FnOnce(&mut Self) -> T) -> Option<T> {
        (self.below(one_in) == 1).then(|| f(self))
    }
}

/// What the numbers in Q, K and V are like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Values {
    /// Uniform in [-1, 1]: the range of the error budget.
    Unit,
    /// Uniform in [-30, 30]: weights that underflow, scores of thousands.
    Large,
    /// Mostly uniform, with NaN, infinities and zeros.
    Special,
    /// Mostly uniform, with denormals and numbers near the largest: not together with infinities, where the
    /// product depends on whether a denormal times the scale is still above 0.
    Extreme,
}

/// One problem with all its memory.
#[derive(Debug, Clone)]
#[allow(missing_docs, reason = "the names of `Terms`")]
pub struct Case {
    pub values: Values,
    /// The elements of Q, K and V are random and independent: none is broadcast, no fuzzer chose them.
    pub independent: bool,
    pub q: Tensor<f32>,
    pub k: Tensor<f32>,
    pub v: Tensor<f32>,
    pub out: Tensor<f32>,
    pub mask: Option<Tensor<bool>>,
    pub bias: Option<Tensor<f32>>,
    pub scale: Option<f32>,
    pub softcap: Option<f32>,
    pub causal: bool,
    pub left: Option<usize>,
    pub right: Option<usize>,
    pub offsets: Option<Vec<i64>>,
    pub position: Position<'static>,
    pub kv_lens: Option<Vec<usize>>,
    pub q_lens: Option<Vec<usize>>,
    pub slopes: Option<Vec<f32>>,
    pub sinks: Option<Vec<f32>>,
    pub gates: Option<Vec<f32>>,
}

/// Sizes on both sides of what the kernels cut at.
const LENGTHS: [usize; 20] =
    [1, 2, 15, 16, 17, 0, 31, 32, 33, 3, 5, 63, 65, 96, 127, 128, 129, 200, 257, 300];
/// Keys of several spans.
const LONG: [usize; 2] = [1100, 2500];
const FEATURES: [usize; 18] = [4, 1, 2, 3, 5, 8, 12, 15, 16, 17, 24, 31, 32, 40, 64, 65, 0, 80];

impl Case {
    /// The case that a seed stands for.
    pub fn from_seed(seed: u64) -> Self {
        let mut state = seed;
        let mut case = Self::draw(&mut Draw(&mut || splitmix(&mut state)));
        case.independent = [&case.q, &case.k, &case.v].iter().all(|x| !x.strides.contains(&0));
        case
    }

    /// The case that a stream of numbers stands for: sizes and options first, then the layouts, the elements
    /// last.
    pub fn draw(draw: &mut Draw<'_>) -> Self {
        Self::draw_within(draw, 40_000)
    }

    /// As [`Case::draw`]. About `scores` pairs of queries and keys, at most, keep the reference quick; one
    /// head may have five times as many.
    pub fn draw_within(draw: &mut Draw<'_>, scores: usize) -> Self {
        let (b, hk, group) = (1 + draw.below(3), 1 + draw.below(3), [1, 2, 3, 4, 7][draw.below(5)]);
        let hq = hk * group;
        let [lq, lk] = [LENGTHS.len(), LENGTHS.len() + LONG.len()].map(|n| draw.below(n));
        let (lq, lk) = (LENGTHS[lq], LENGTHS.get(lk).copied().unwrap_or_else(|| LONG[lk - LENGTHS.len()]));
        let [d, dv] = [FEATURES[draw.below(FEATURES.len())], FEATURES[draw.below(FEATURES.len())]];
        let (b, hk, hq) = if b * hq * lq * lk > scores { (1, 1, group) } else { (b, hk, hq) };
        let most = if lk > 1000 { scores } else { 5 * scores };
        let hq = if hq * lq * lk > most { hk } else { hq };
        let lq = lq.min(1 + most / (hq * lk).max(1));
        let values = [Values::Unit, Values::Large, Values::Special, Values::Extreme][draw.below(4)];
        let scores = [b, hq, lq, lk];
        let broadcast = |draw: &mut Draw<'_>| scores.map(|n| if draw.below(3) == 1 { 1 } else { n });
        let (mask_shape, bias_shape) = (broadcast(draw), broadcast(draw));
        let rare = [2, 20][draw.below(2)]; // one in how many pairs is hidden
        let masks = [draw.below(3) == 1, draw.below(3) == 1];
        let mut case = Self {
            values,
            independent: false,
            scale: if d == 0 { Some(1.0) } else { draw.maybe(3, |draw| 2.0 * draw.uniform()) },
            softcap: draw.maybe(4, |draw| 0.1 + 30.0 * draw.uniform().abs()),
            causal: draw.below(2) == 1,
            left: draw.maybe(4, |draw| draw.below(lk + 2)),
            right: draw.maybe(4, |draw| draw.below(lk + 2)),
            offsets: draw.maybe(6, |draw| (0..b).map(|_| offset(draw, lk)).collect()),
            position: match draw.below(4) {
                1 => Position::TopLeft,
                2 => Position::At(offset(draw, lk)),
                _ => Position::BottomRight,
            },
            kv_lens: draw.maybe(4, |draw| (0..b).map(|_| draw.below(lk + 1)).collect()),
            q_lens: draw.maybe(6, |draw| (0..b).map(|_| draw.below(lq + 1)).collect()),
            slopes: draw.maybe(5, |draw| (0..hq).map(|_| draw.uniform()).collect()),
            sinks: draw.maybe(5, |draw| {
                let sink = |draw: &mut Draw<'_>| {
                    if draw.below(4) == 1 { f32::NEG_INFINITY } else { 9.0 * draw.uniform() }
                };
                (0..hq).map(|_| sink(draw)).collect()
            }),
            gates: draw.maybe(5, |draw| {
                (0..hq).map(|_| if draw.below(3) == 1 { 0.0 } else { 2.0 * draw.uniform() }).collect()
            }),
            q: Tensor::laid_out(draw, [b, hq, lq, d], true, 0.0),
            k: Tensor::laid_out(draw, [b, hk, lk, d], true, 0.0),
            v: Tensor::laid_out(draw, [b, hk, lk, dv], true, 0.0),
            out: Tensor::laid_out(draw, [b, hq, lq, dv], false, f32::NAN),
            mask: masks[0].then(|| Tensor::laid_out(draw, mask_shape, true, true)),
            bias: masks[1].then(|| Tensor::laid_out(draw, bias_shape, true, 0.0)),
        };
        if let Some(mask) = &mut case.mask {
            mask.fill(draw, |draw| draw.below(rare) != 1);
        }
        if let Some(bias) = &mut case.bias {
            bias.fill(draw, |draw| match draw.below(rare * 2) {
                1 => f32::NEG_INFINITY,
                3 => 1000.0 * draw.uniform(),
                _ => draw.uniform(),
            });
        }
        for tensor in [&mut case.q, &mut case.k, &mut case.v] {
            tensor.fill(draw, |draw| number(draw, values));
        }
        case
    }

    /// The options.
    pub fn terms(&self) -> Terms<'_> {
        Terms {
            scale: self.scale,
            softcap: self.softcap,
            causal: self.causal,
            left: self.left,
            right: self.right,
            position: self.offsets.as_deref().map_or(self.position, Position::Each),
            mask: self.mask.as_ref().map(Tensor::view),
            bias: self.bias.as_ref().map(Tensor::view),
            kv_lens: self.kv_lens.as_deref(),
            q_lens: self.q_lens.as_deref(),
            slopes: self.slopes.as_deref(),
            sinks: self.sinks.as_deref(),
            gates: self.gates.as_deref(),
        }
    }

    /// Output (compact `[B, Hq, Lq, Dv]`) and LSE at a level, in the current thread pool.
    pub fn run(&self, level: Level) -> Result<(Vec<f32>, Vec<f32>), Error> {
        let [b, hq, lq, _] = self.q.shape;
        let (mut out, mut lse) = (self.out.clone(), vec![f32::NAN; b * hq * lq]);
        Attention::with_terms(self.terms()).level(level).run_with_lse(
            self.q.view(),
            self.k.view(),
            self.v.view(),
            ViewMut::new(&mut out.data, out.offset, out.shape, out.strides)?,
            &mut lse,
        )?;
        Ok((compact(&out), lse))
    }

    /// The reference's answer.
    pub fn reference(&self) -> Result<reference::Reference, Error> {
        reference::attention(self.q.view(), self.k.view(), self.v.view(), &self.terms())
    }

    /// Runs the case at every level given and compares with the reference, and the levels with each other;
    /// says what differs.
    pub fn check(&self, levels: &[Level]) -> Result<(), String> {
        let reference = self.reference().map_err(|error| format!("reference: {error}"))?;
        let limits = self.limits(&reference);
        let mut answers = vec![("reference", [reference.out, reference.lse])];
        for &level in levels {
            let (out, lse) = self.run(level).map_err(|error| format!("{level}: {error}"))?;
            let answer = [out, lse].map(|x| x.into_iter().map(f64::from).collect::<Vec<f64>>());
            for (name, other) in &answers {
                self.compare(level.name(), &answer, name, other, &limits)?;
            }
            answers.push((level.name(), answer));
        }
        Ok(())
    }

    /// Holds output and LSE against others. Two levels may differ by no more than one of them from the
    /// reference: they do the same steps in the same order, and round alike but for fused multiply-adds.
    fn compare(
        &self,
        name: &str,
        [out, lse]: &[Vec<f64>; 2],
        by: &str,
        [want_out, want_lse]: &[Vec<f64>; 2],
        limits: &[Option<[f64; 2]>],
    ) -> Result<(), String> {
        let dv = self.v.shape[3];
        for (row, limit) in limits.iter().enumerate() {
            let Some([out_limit, lse_limit]) = *limit else { continue };
            let values = (row * dv..(row + 1) * dv).map(|at| ("out", at, out[at], want_out[at], out_limit));
            for (what, at, got, want, limit) in
                values.chain([("lse", row, lse[row], want_lse[row], lse_limit)])
            {
                let fine = match want {
                    f64::NEG_INFINITY if what == "lse" => got == f64::NEG_INFINITY,
                    want if want.is_finite() && want.abs() > 1e37 => true, // f32 may overflow
                    want if want.is_finite() => (got - want).abs() <= limit,
                    _ => !got.is_finite(),
                };
                if !fine {
                    let row = format!("row {row} of [B, Hq, Lq] = {:?}", &self.q.shape[..3]);
                    return Err(format!(
                        "{name}: {what}[{at}] is {got:e}, {by} {want:e}, limit {limit:e}, {row}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// What each row's output and LSE may differ by; `None` where f32 may overflow on the way.
    ///
    /// A score is off by rounding in proportion to the sum of |q||k|; a weight, relatively, by twice that.
    fn limits(&self, reference: &reference::Reference) -> Vec<Option<[f64; 2]>> {
        const EPS: f64 = f32::EPSILON as f64;
        // For inputs uniform in [-1, 1], whose rounding errors cancel. Where elements are equal they do not:
        // 80 products of broadcast features err to one side, and a plain softmax in f32 exceeds it.
        const BUDGET: f64 = 2e-6;
        let plain = self.scale.is_none() && self.bias.is_none() && self.slopes.is_none();
        let budgeted = self.independent && self.values == Values::Unit && plain;
        let ([batch, hq, lq, d], [_, hk, lk, dv]) = (self.q.shape, self.v.shape);
        let (q, k, v) = (self.q.view(), self.k.view(), self.v.view());
        let at = |x: View<'_, f32>, i| x.get(i).map_or(0.0, |x| x.abs() as f64);
        let scale = self.scale.unwrap_or(1.0 / (d as f32).sqrt()).abs() as f64;
        let row = |row: usize| {
            let (b, h, i) = (row / (hq * lq), row / lq % hq, row % lq);
            let kv_head = h / (hq / hk);
            let (mut score, mut value) = (1.0f64, 0.0f64);
            for j in (0..lk).filter(|j| reference.biased[row * lk + j] != f64::NEG_INFINITY) {
                let dot: f64 = (0..d).map(|c| at(q, [b, h, i, c]) * at(k, [b, kv_head, j, c])).sum();
                let biased = reference.biased[row * lk + j];
                let added = biased - reference.capped[row * lk + j];
                let bias = self
                    .bias
                    .as_ref()
                    .and_then(|bias| bias.view().broadcast([batch, hq, lq, lk])?.get([b, h, i, j]));
                let bias = bias.unwrap_or(0.0) as f64;
                // Max ignores NaN: a row that sees NaN is compared as not finite, whatever the limits.
                let terms = [dot * scale, biased.abs(), bias.abs(), (added - bias).abs()];
                score = terms.into_iter().fold(score, f64::max);
                for c in 0..dv {
                    value = value.max(at(v, [b, kv_head, j, c]));
                }
            }
            let largest = (0..d).map(|c| at(q, [b, h, i, c])).fold(0.0, f64::max) * scale;
            let fits = score < 1e37 && largest < 1e37 && value < 1e37;
            if !fits && !reference.out[row * dv..][..dv].iter().any(|x| x.is_nan()) {
                return None;
            }
            let score = EPS * score * (4.0 + (d as f64).sqrt());
            let gate = self.gates.as_ref().map_or(1.0, |gates| gates[h].abs() as f64);
            let out = gate * value * (2.0 * score + 1e-6 + EPS * (lk as f64).sqrt());
            let out = if budgeted { out.min(gate * BUDGET) } else { out };
            let lse = 2.0 * score + 1e-6 + EPS * ((lk as f64).sqrt() + 2.0 * reference.lse[row].abs());
            (score < 0.25).then_some([out, lse])
        };
        (0..reference.lse.len()).map(row).collect()
    }
}

/// The next number of a stream (splitmix64: Steele, Lea and Flood 2014).
pub fn splitmix(state: &mut u64) -> u32 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 32) as u32
}

fn compact(tensor: &Tensor<f32>) -> Vec<f32> {
    let (view, [b, h, l, d]) = (tensor.view(), tensor.shape);
    let index = |i: usize| [i / (h * l * d), i / (l * d) % h, i / d % l, i % d];
    (0..b * h * l * d).filter_map(|i| view.get(index(i))).collect()
}

fn offset(draw: &mut Draw<'_>, lk: usize) -> i64 {
    match draw.below(12) {
        1 => i64::MAX,
        2 => i64::MIN,
        _ => draw.below(2 * lk + 5) as i64 - (lk as i64 / 2 + 2),
    }
}

fn number(draw: &mut Draw<'_>, values: Values) -> f32 {
    const SPECIAL: [f32; 5] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0];
    const EXTREME: [f32; 5] = [1e-40, -1e-45, f32::MAX, f32::MIN, 1e18];
    match values {
        Values::Unit => draw.uniform(),
        Values::Large => 30.0 * draw.uniform(),
        Values::Special if draw.below(200) == 1 => SPECIAL[draw.below(SPECIAL.len())],
        Values::Extreme if draw.below(200) == 1 => EXTREME[draw.below(EXTREME.len())],
        Values::Special | Values::Extreme => 3.0 * draw.uniform(),
    }
}
