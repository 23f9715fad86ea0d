//! Faults that users of other attention implementations have met, each with its whole kind.
//!
//! Every test names the public report and tells the fault in our words; the inputs and the expected numbers
//! are ours, from a float64 evaluation or in closed form. All run at every level of this machine, and the
//! reference has to give the same numbers.
//!
//! Left to later, because what they are about is not here yet:
//!
//! - f16 and bf16: PaddlePaddle/Paddle #41933 (overflow of the dot product), pytorch/pytorch #163588 (sums in
//!   half precision), the half-precision parts of the head sizes and of unaligned slices
//! - the slope series of ALiBi: the first half of ml-explore/mlx #343
//! - the backward pass: pytorch/pytorch #41508, pytorch/pytorch #148476, marin-community/levanter #449
//! - time is measured in the benches: pytorch/pytorch #92892, fishaudio/fish-speech #1310, half of
//!   huggingface/funes #160; memory in a test of its own: lucidrains/x-transformers #261
//! - layers, rotary positions, blocked-masks, extra slots and pruning have tests beside the layer's own, in
//!   `tests/layer`
//! - builds: huggingface/candle #494, and the disassembly of CrispStrobe/CrispEmbed #41

mod hidden;
mod layouts;
mod masks;
mod merging;
mod positions;
mod scores;
mod shapes;
mod threads;

use headwise::{Attention, Level, View, ViewMut, reference};

/// Output, compact `[B, Hq, Lq, Dv]`, and LSE.
type Answer = (Vec<f32>, Vec<f32>);

fn levels() -> impl Iterator<Item = Level> {
    Level::available()
}

/// `sin(a * i + b)` for i = 0, 1, ...
fn wave(a: f64, b: f64, n: usize) -> Vec<f32> {
    (0..n).map(|i| (a * i as f64 + b).sin() as f32).collect()
}

/// `0, 1, 2, ...`
fn ramp(n: usize) -> Vec<f32> {
    (0..n).map(|i| i as f32).collect()
}

fn bhld<T>(data: &[T], shape: [usize; 4]) -> View<'_, T> {
    View::bhld(data, shape).expect("compact")
}

/// A mask or bias.
fn compact<'a, T>(data: &'a [T], sizes: &[usize]) -> View<'a, T> {
    View::compact(data, sizes).expect("compact")
}

/// The mask whose entry `[i, j]` is `keep(i, j)`.
fn keep(l: usize, s: usize, keep: impl Fn(usize, usize) -> bool) -> Vec<bool> {
    (0..l * s).map(|at| keep(at / s, at % s)).collect()
}

fn run<'a>(
    attention: Attention<'a>,
    level: Level,
    q: View<'a, f32>,
    k: View<'a, f32>,
    v: View<'a, f32>,
) -> Answer {
    let ([b, h, l, _], dv) = (q.shape(), v.shape()[3]);
    let (mut out, mut lse) = (vec![f32::NAN; b * h * l * dv], vec![f32::NAN; b * h * l]);
    let view = ViewMut::bhld(&mut out, [b, h, l, dv]).expect("compact");
    attention.level(level).run_with_lse(q, k, v, view, &mut lse).expect("a valid call");
    (out, lse)
}

/// Every level and the reference give these outputs, to 1e-5 of the largest.
#[track_caller]
fn gives<'a>(attention: Attention<'a>, q: View<'a, f32>, k: View<'a, f32>, v: View<'a, f32>, want: &[f64]) {
    let reference = reference::attention(q, k, v, attention.terms()).expect("a valid call");
    near("reference out", &reference.out, want, 1e-6); // its inputs are rounded to f32
    for level in levels() {
        let out: Vec<f64> = run(attention, level, q, k, v).0.into_iter().map(f64::from).collect();
        near(&format!("{level} out"), &out, want, 1e-5);
    }
}

/// As [`gives`], and the LSE.
#[track_caller]
fn gives_lse<'a>(
    attention: Attention<'a>,
    q: View<'a, f32>,
    k: View<'a, f32>,
    v: View<'a, f32>,
    want: &[f64],
    lse: &[f64],
) {
    gives(attention, q, k, v, want);
    let reference = reference::attention(q, k, v, attention.terms()).expect("a valid call");
    near("reference lse", &reference.lse, lse, 1e-6);
    for level in levels() {
        let got: Vec<f64> = run(attention, level, q, k, v).1.into_iter().map(f64::from).collect();
        near(&format!("{level} lse"), &got, lse, 1e-5);
    }
}

/// Attention where all scores are 0 (D = 1): every row is the mean of the values `v [B, Hk, Lk]` it sees.
#[track_caller]
fn flat(attention: Attention<'_>, [b, hq, hk, l, s]: [usize; 5], v: &[f32], want: &[f64]) {
    let zeros = vec![0.0; (b * hq * l).max(b * hk * s)];
    let q = bhld(&zeros[..b * hq * l], [b, hq, l, 1]);
    let k = bhld(&zeros[..b * hk * s], [b, hk, s, 1]);
    gives(attention, q, k, bhld(v, [b, hk, s, 1]), want);
}

/// Equal, or no further apart than `relative` times the largest.
#[track_caller]
fn near(what: &str, got: &[f64], want: &[f64], relative: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().filter(|x| x.is_finite()).fold(0.0, |m: f64, x| m.max(x.abs()));
    let limit = relative * largest;
    let close = |got: f64, want: f64| got == want || (got - want).abs() <= limit; // NaN never is
    let far = got.iter().zip(want).position(|(&got, &want)| !close(got, want));
    if let Some(at) = far {
        panic!("{what}[{at}] is {:e}, not {:e}\n{got:?}\n{want:?}", got[at], want[at]);
    }
}

/// The same bits; any NaN is like any other.
#[track_caller]
fn same(what: impl std::fmt::Display, got: &Answer, want: &Answer) {
    for (name, got, want) in [("out", &got.0, &want.0), ("lse", &got.1, &want.1)] {
        assert_eq!(got.len(), want.len(), "{what}: {name}");
        let differ = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan());
        if let Some(at) = got.iter().zip(want).position(differ) {
            panic!("{what}: {name}[{at}] is {:e}, not {:e}", got[at], want[at]);
        }
    }
}

/// Keys `ln(s + 1)`, queries and scale such that the score is `ln(s + 1)`, values `s + d`: row `i` of the
/// output is `2 (S - 1) / 3 + d` exactly, and any dropped, doubled or foreign lane shows.
struct Ln {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    shape: [usize; 4],
    s: usize,
    dv: usize,
}

impl Ln {
    /// `[B, H, L, D]`, keys, value features.
    fn new(shape: [usize; 4], s: usize, dv: usize) -> Self {
        let [b, h, l, d] = shape;
        let q = vec![(1.0 / (d as f64).sqrt()) as f32; b * h * l * d];
        let k = (0..b * h * s * d).map(|at| ((at / d % s + 1) as f64).ln() as f32).collect();
        let v = (0..b * h * s * dv).map(|at| (at / dv % s + at % dv) as f32).collect();
        Self { q, k, v, shape, s, dv }
    }

    fn views(&self) -> [View<'_, f32>; 3] {
        let [b, h, _, d] = self.shape;
        let (k, v) = ([b, h, self.s, d], [b, h, self.s, self.dv]);
        [bhld(&self.q, self.shape), bhld(&self.k, k), bhld(&self.v, v)]
    }

    fn expected(&self) -> Vec<f64> {
        let [b, h, l, _] = self.shape;
        let row = (0..self.dv).map(|c| 2.0 * (self.s as f64 - 1.0) / 3.0 + c as f64);
        (0..b * h * l).flat_map(|_| row.clone()).collect()
    }
}
