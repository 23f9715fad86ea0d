//! One random attention problem: made from a stream of numbers, run at a level, held against the reference.
//!
//! `headwise check`, the tests and the fuzz target share it. A case owns its memory; its views take every
//! kind of stride. Each number drawn has a plain meaning and zeros make the plainest case: shrinking works.

use half::{bf16, f16};
use headwise::reference::{self, Reference};
use headwise::{Attention, DType, Element, Error, Level, Position, Stored, Terms, View, ViewMut};

// The tests include this file by its path.
#[path = "case/draw.rs"]
mod draw;
#[path = "case/form.rs"]
mod form;
#[path = "case/limits.rs"]
mod limits;

pub use draw::{Draw, Values, splitmix};
use draw::{number, offset};
pub use form::Form;
use limits::Limits;

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

    /// The same with other elements.
    fn map<U>(&self, element: impl Fn(T) -> U) -> Tensor<U> {
        let Self { offset, shape, strides, .. } = *self;
        Tensor { data: self.data.iter().map(|&x| element(x)).collect(), offset, shape, strides }
    }

    /// The view.
    pub fn view(&self) -> View<'_, T> {
        View::new(&self.data, self.offset, self.shape, self.strides).expect("made to fit")
    }
}

/// One problem with all its memory.
#[derive(Debug, Clone)]
#[allow(missing_docs, reason = "the names of `Terms`")]
pub struct Case {
    pub values: Values,
    /// The case is also run with its tokens laid out so.
    pub form: Form,
    /// Of Q and the output, and of K and V; the numbers below are rounded to them.
    pub dtypes: [DType; 2],
    /// For integers, the scales of K and V.
    pub scales: [Tensor<f32>; 2],
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
        let dtypes = [draw.below(6), draw.below(8)];
        let of_q = [DType::F32, DType::F32, DType::F32, DType::F32, DType::F16, DType::Bf16][dtypes[0]];
        let of_kv = [of_q, of_q, of_q, of_q, DType::F32, DType::F16, DType::Bf16, DType::I8][dtypes[1]];
        let values = [Values::Unit, Values::Large, Values::Special, Values::Extreme][draw.below(4)];
        let scores = [b, hq, lq, lk];
        let broadcast = |draw: &mut Draw<'_>| scores.map(|n| if draw.below(3) == 1 { 1 } else { n });
        let (mask_shape, bias_shape) = (broadcast(draw), broadcast(draw));
        let rare = [2, 20][draw.below(2)]; // one in how many pairs is hidden
        let masks = [draw.below(3) == 1, draw.below(3) == 1];
        let mut case = Self {
            values,
            form: Form::draw(draw, lk),
            dtypes: [of_q, of_kv],
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
            scales: [d, dv].map(|features| {
                let groups = if of_kv == DType::I8 { [1, 1, 2, 3][draw.below(4)] } else { 1 };
                let per = features.div_ceil(groups).max(1);
                Tensor::laid_out(draw, [b, hk, lk, features.div_ceil(per).max(1)], true, 1.0)
            }),
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
        if of_kv == DType::I8 {
            for scales in &mut case.scales {
                scales.fill(draw, |draw| number(draw, values) / 128.0) // 127 of it stay finite;
            }
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
        struct Run<'a>(&'a Case, Level);
        impl Typed for Run<'_> {
            type Output = Result<(Vec<f32>, Vec<f32>), Error>;
            fn call<T: Element, C: Stored>(
                self,
                q: View<'_, T>,
                k: View<'_, C>,
                v: View<'_, C>,
            ) -> Self::Output {
                let Self(case, level) = self;
                let [b, hq, lq, _] = q.shape();
                let (mut out, mut lse) = (case.out.map(T::from_f32), vec![f32::NAN; b * hq * lq]);
                let to = ViewMut::new(&mut out.data, out.offset, out.shape, out.strides)?;
                Attention::with_terms(case.terms()).level(level).run_with_lse(q, k, v, to, &mut lse)?;
                Ok((compact(&out.map(T::to_f32)), lse))
            }
        }
        self.typed(Run(self, level))
    }

    /// The reference's answer, on the rounded numbers.
    pub fn reference(&self) -> Result<Reference, Error> {
        struct Answer<'a>(&'a Case);
        impl Typed for Answer<'_> {
            type Output = Result<Reference, Error>;
            fn call<T: Element, C: Stored>(
                self,
                q: View<'_, T>,
                k: View<'_, C>,
                v: View<'_, C>,
            ) -> Self::Output {
                reference::attention(q, k, v, &self.0.terms())
            }
        }
        self.typed(Answer(self))
    }

    /// Calls `f` with Q, K and V of their types.
    fn typed<F: Typed>(&self, f: F) -> F::Output {
        match self.dtypes[0] {
            DType::F16 => self.typed_q::<f16, F>(f),
            DType::Bf16 => self.typed_q::<bf16, F>(f),
            _ => self.typed_q::<f32, F>(f),
        }
    }

    fn typed_q<T: Element, F: Typed>(&self, f: F) -> F::Output {
        match self.dtypes[1] {
            DType::F16 => self.typed_kv::<T, f16, F>(f),
            DType::Bf16 => self.typed_kv::<T, bf16, F>(f),
            DType::I8 => self.typed_kv::<T, i8, F>(f),
            _ => self.typed_kv::<T, f32, F>(f),
        }
    }

    fn typed_kv<T: Element, C: Stored, F: Typed>(&self, f: F) -> F::Output {
        // Finite numbers stay finite; integers are spread over their range.
        let (most, factor) = match C::DTYPE {
            DType::I8 => (127.0, 64.0),
            dtype => (largest(dtype), 1.0),
        };
        let limit = |x: f32, most: f32| if x.is_finite() { x.clamp(-most, most) } else { x };
        // Products of bf16 take subnormal numbers for 0, which shows where they meet huge ones.
        let paired = self.dtypes == [DType::Bf16; 2];
        let normal = |x: f32| if paired && x.abs() < f32::MIN_POSITIVE { 0.0 } else { x };
        let q = self.q.map(|x| T::from_f32(normal(limit(x, largest(T::DTYPE)))));
        let [k, v] = [&self.k, &self.v].map(|x| x.map(|x| C::from_f32(normal(limit(x * factor, most)))));
        let (mut view_k, mut view_v) = (k.view(), v.view());
        if C::DTYPE == DType::I8 {
            let [of_k, of_v] = self.scales.each_ref().map(Tensor::view);
            view_k = view_k.scaled(of_k).expect("made to fit");
            view_v = view_v.scaled(of_v).expect("made to fit");
        }
        f.call(q.view(), view_k, view_v)
    }

    /// Runs the case at every level given and compares with the reference, and the levels with each other;
    /// says what differs.
    pub fn check(&self, levels: &[Level]) -> Result<(), String> {
        let reference = self.reference().map_err(|error| format!("reference: {error}"))?;
        let limits = self.typed(Limits(self, &reference));
        let mut answers = vec![("reference", [reference.out, reference.lse])];
        for &level in levels {
            let (out, lse) = self.run(level).map_err(|error| format!("{level}: {error}"))?;
            if self.form != Form::Strided {
                self.check_form(level)?;
            }
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
        limits: &[Option<[f64; 3]>],
    ) -> Result<(), String> {
        let dv = self.v.shape[3];
        // What the output's type rounds by, at most, and where it may overflow.
        let (rounding, least, overflow) = match self.dtypes[0] {
            DType::F16 => (2f64.powi(-11), 2f64.powi(-25), 6.5e4),
            DType::Bf16 => (2f64.powi(-8), 0.0, 1e37),
            _ => (0.0, 0.0, 1e37),
        };
        // Weights that are rounded to bf16 add up to one such error of the largest value there is.
        let is_fast = |name: &&str| name.parse().is_ok_and(|level: Level| level != level.exact());
        let fast = [name, by].iter().any(is_fast) && self.dtypes == [DType::Bf16; 2];
        // Two levels may round to different sides.
        let (rounding, least) =
            if by == "reference" { (rounding, least) } else { (2.0 * rounding, 2.0 * least) };
        for (row, limit) in limits.iter().enumerate() {
            let Some([out_limit, lse_limit, value]) = *limit else { continue };
            let out_limit = if fast { out_limit + 2f64.powi(-8) * value } else { out_limit };
            let values = (row * dv..(row + 1) * dv).map(|at| ("out", at, out[at], want_out[at], out_limit));
            for (what, at, got, want, limit) in
                values.chain([("lse", row, lse[row], want_lse[row], lse_limit)])
            {
                let fine = match want {
                    f64::NEG_INFINITY if what == "lse" => got == f64::NEG_INFINITY,
                    want if what == "out" && want.is_finite() && want.abs() > overflow => true,
                    want if what == "out" && want.is_finite() => {
                        (got - want).abs() <= limit + rounding * want.abs() + least
                    }
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
}

/// Something to do with Q, K and V of any types.
trait Typed {
    type Output;
    fn call<T: Element, C: Stored>(self, q: View<'_, T>, k: View<'_, C>, v: View<'_, C>) -> Self::Output;
}

/// The largest number of a type.
fn largest(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => f16::MAX.to_f32(),
        DType::Bf16 => bf16::MAX.to_f32(),
        _ => f32::MAX,
    }
}

fn compact(tensor: &Tensor<f32>) -> Vec<f32> {
    let (view, [b, h, l, d]) = (tensor.view(), tensor.shape);
    let index = |i: usize| [i / (h * l * d), i / (l * d) % h, i / d % l, i % d];
    (0..b * h * l * d).filter_map(|i| view.get(index(i))).collect()
}
