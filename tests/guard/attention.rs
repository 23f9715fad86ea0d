//! Attention: q, k, v and their scales, mask, bias, the lists of lengths, offsets, slopes, sinks and gates,
//! the output, the LSE and the map, of every type at every level.

use half::{bf16, f16};
use headwise::{Attention, DType, Element, Level, Position, Stage, Stored, Terms, View};

use super::memory::{Guarded, Trap};
use super::{SIZES, view, view_mut};

/// One problem: sizes, and which options it has.
#[derive(Debug, Clone, Copy)]
struct Case {
    b: usize,
    hk: usize,
    group: usize,
    lq: usize,
    lk: usize,
    d: usize,
    dv: usize,
    /// Features that share a scale, of integers.
    per: usize,
    tokens_first: bool,
    causal: bool,
    mask: bool,
    bias: bool,
    /// Mask and bias are the same for all heads and batch entries.
    shared: bool,
    /// Lengths, offsets, slopes, sinks and gates.
    lists: bool,
}

/// What a call reads.
struct Inputs<T, C> {
    q: Guarded<T>,
    k: Guarded<C>,
    v: Guarded<C>,
    k_scales: Guarded<f32>,
    v_scales: Guarded<f32>,
    mask: Guarded<bool>,
    bias: Guarded<f32>,
    slopes: Guarded<f32>,
    sinks: Guarded<f32>,
    gates: Guarded<f32>,
    kv_lens: Guarded<usize>,
    q_lens: Guarded<usize>,
    offsets: Guarded<i64>,
}

impl<T: Element, C: Stored> Inputs<T, C> {
    fn new(case: &Case, trap: Trap) -> Self {
        let Case { b, hk, group, lq, lk, d, dv, per, .. } = *case;
        let (hq, mut state) = (hk * group, 1u32);
        let mut random = |n: usize| -> Vec<f32> {
            let next = |_| {
                state = state.wrapping_mul(1664525).wrapping_add(1013904223);
                (state >> 8) as f32 / (1 << 23) as f32 - 1.0
            };
            (0..n).map(next).collect()
        };
        let q: Vec<T> = random(b * hq * lq * d).into_iter().map(T::from_f32).collect();
        let unit = if C::DTYPE == DType::I8 { 127.0 } else { 1.0 };
        let [k, v] = [d, dv].map(|d| -> Vec<C> {
            random(b * hk * lk * d).into_iter().map(|x| C::from_f32(x * unit)).collect()
        });
        let scales = |features: usize| vec![0.01; b * hk * lk * features.div_ceil(per)];
        let bias = random(case.scores().iter().product());
        let mask: Vec<bool> = bias.iter().map(|x| x.abs() > 0.2).collect();
        Self {
            q: Guarded::new(&q, trap),
            k: Guarded::new(&k, trap),
            v: Guarded::new(&v, trap),
            k_scales: Guarded::new(&scales(d), trap),
            v_scales: Guarded::new(&scales(dv), trap),
            mask: Guarded::new(&mask, trap),
            bias: Guarded::new(&bias, trap),
            slopes: Guarded::new(&random(hq), trap),
            sinks: Guarded::new(&random(hq), trap),
            gates: Guarded::new(&random(hq), trap),
            kv_lens: Guarded::new(&(0..b).map(|b| lk - b.min(lk)).collect::<Vec<_>>(), trap),
            q_lens: Guarded::new(&(0..b).map(|b| lq - b.min(lq)).collect::<Vec<_>>(), trap),
            offsets: Guarded::new(&(0..b).map(|b| b as i64 + 1).collect::<Vec<_>>(), trap),
        }
    }
}

/// What a call writes.
struct Outputs<T> {
    out: Guarded<T>,
    lse: Guarded<f32>,
    map: Guarded<f32>,
}

impl<T: Element> Outputs<T> {
    fn new(case: &Case, trap: Trap) -> Self {
        let Case { b, hk, group, lq, lk, dv, .. } = *case;
        let (nan, rows) = (f32::NAN, b * hk * group * lq);
        Self {
            out: Guarded::new(&vec![T::from_f32(nan); rows * dv], trap),
            lse: Guarded::new(&vec![nan; rows], trap),
            map: Guarded::new(&vec![nan; rows * lk], trap),
        }
    }

    fn bits(&self) -> Vec<u32> {
        let out = self.out.iter().map(|x| x.to_f32());
        out.chain(self.lse.iter().copied()).chain(self.map.iter().copied()).map(f32::to_bits).collect()
    }
}

impl Case {
    /// The `i`-th case of some sizes: options and heads take turns.
    fn new(i: usize, [lq, lk, d, dv]: [usize; 4]) -> Self {
        let bit = |n: u32| i >> n & 1 == 1;
        let (b, hk, group) = [(1, 1, 1), (2, 1, 1), (1, 1, 3), (1, 2, 2), (1, 1, 2)][i % 5];
        let (tokens_first, causal, mask, bias, lists) = (bit(0), bit(1), bit(2), bit(3), bit(4));
        let (shared, per) = (i.is_multiple_of(3), if bit(5) { 8 } else { usize::MAX });
        Self { b, hk, group, lq, lk, d, dv, per, tokens_first, causal, mask, bias, shared, lists }
    }

    fn scores(&self) -> [usize; 4] {
        let Self { b, hk, group, lq, lk, shared, .. } = *self;
        if shared { [1, 1, lq, lk] } else { [b, hk * group, lq, lk] }
    }

    /// Keys or values, integers with their scales.
    fn stored<'a, C: Stored>(&self, data: &'a [C], scales: &'a [f32], d: usize) -> View<'a, C> {
        let Self { b, hk, lk, per, .. } = *self;
        let plain = view(self.tokens_first, data, [b, hk, lk, d]);
        match C::DTYPE {
            DType::I8 => plain.scaled(view(self.tokens_first, scales, [b, hk, lk, d.div_ceil(per)])).unwrap(),
            _ => plain,
        }
    }

    fn run<T: Element, C: Stored>(&self, level: Level, from: &Inputs<T, C>, to: &mut Outputs<T>) {
        let Self { b, hk, group, lq, d, dv, lists, .. } = *self;
        let hq = hk * group;
        let q = view(self.tokens_first, &from.q, [b, hq, lq, d]);
        let (k, v) = (self.stored(&from.k, &from.k_scales, d), self.stored(&from.v, &from.v_scales, dv));
        let out = view_mut(self.tokens_first, &mut to.out, [b, hq, lq, dv]);
        let terms = Terms {
            causal: self.causal,
            position: if lists { Position::Each(&from.offsets) } else { Position::BottomRight },
            mask: self.mask.then(|| View::bhld(&from.mask, self.scores()).unwrap()),
            bias: self.bias.then(|| View::bhld(&from.bias, self.scores()).unwrap()),
            kv_lens: lists.then_some(&from.kv_lens),
            q_lens: lists.then_some(&from.q_lens),
            slopes: lists.then_some(&from.slopes),
            sinks: lists.then_some(&from.sinks),
            gates: lists.then_some(&from.gates),
            ..Terms::default()
        };
        let attention = Attention::with_terms(terms).level(level);
        attention.run_with_lse(q, k, v, out, &mut to.lse).unwrap();
        let stage = if self.shared { Stage::Weights } else { Stage::Biased };
        attention.scores(stage, q, k, 0..hq, 0..lq, &mut to.map).unwrap();
    }

    /// Ordinary memory against guarded memory, at every level.
    fn check<T: Element, C: Stored>(&self, levels: &[Level]) {
        println!("{} on {}: {self:?}", T::DTYPE, C::DTYPE); // seen after a crash, with --nocapture
        let results = [Trap::Nowhere, Trap::Behind, Trap::Before].map(|trap| {
            let inputs = Inputs::<T, C>::new(self, trap);
            let of_level = |&level| {
                let mut outputs = Outputs::new(self, trap);
                self.run(level, &inputs, &mut outputs);
                assert!(outputs.out.iter().all(|x| x.to_f32().is_finite()), "{level} {trap:?}: {self:?}");
                outputs.bits()
            };
            levels.iter().map(of_level).collect::<Vec<_>>()
        });
        for (i, level) in levels.iter().enumerate() {
            let [ordinary, behind, before] = results.each_ref().map(|of_levels| &of_levels[i]);
            assert!(ordinary == behind && ordinary == before, "{level}: {self:?}");
        }
    }
}

/// Pairs of lengths with some pair of features, and the other way round: each `step`-th one.
fn nothing_beside_is_touched<T: Element, C: Stored>(step: usize) {
    let levels: Vec<Level> = Level::available().collect();
    for i in (0..SIZES.len() * SIZES.len()).step_by(step) {
        let (x, y) = (SIZES[i % SIZES.len()], SIZES[i / SIZES.len()]);
        let (z, w) = (SIZES[i * 7 % 12], SIZES[i * 5 % 13]); // up to 33 and 40
        Case::new(i, [x, y, z, w]).check::<T, C>(&levels);
        Case::new(i * 11 + 5, [z, w, x, y]).check::<T, C>(&levels);
    }
}

#[test]
fn of_f32() {
    nothing_beside_is_touched::<f32, f32>(1);
}

#[test]
fn of_f16() {
    nothing_beside_is_touched::<f16, f16>(2);
}

#[test]
fn of_bf16() {
    nothing_beside_is_touched::<bf16, bf16>(2);
}

#[test]
fn of_integers() {
    nothing_beside_is_touched::<f32, i8>(2);
    nothing_beside_is_touched::<bf16, i8>(7);
}

#[test]
fn of_other_mixtures() {
    nothing_beside_is_touched::<f32, f16>(7);
    nothing_beside_is_touched::<f32, bf16>(7);
    nothing_beside_is_touched::<f16, f32>(7);
}
