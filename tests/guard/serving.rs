//! Packed sequences, paged and rolling caches: queries, keys, values and their scales, the output, and the
//! lists that say where tokens lie.

use half::{bf16, f16};
use headwise::{Attention, DType, Element, Level, Stored};

use super::memory::{Guarded, Trap};
use super::{SIZES, view, view_mut};

/// How the tokens of keys and values lie; of packed ones those of the queries, too.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    Packed,
    /// In pages of so many tokens.
    Paged(usize),
    /// With so many tokens that stay.
    Rolling(usize),
}

/// Sequences of these many queries and keys.
#[derive(Debug, Clone, Copy)]
struct Case {
    form: Form,
    queries: [usize; 2],
    keys: [usize; 2],
    heads: [usize; 2],
    d: usize,
    tokens_first: bool,
}

fn numbers<T: Stored>(n: usize) -> Vec<T> {
    let unit = if T::DTYPE == DType::I8 { 127.0 } else { 1.0 };
    let hash = |i: usize| (i as u32 + 1).wrapping_mul(2_654_435_761) as i32 as f32 / 2f32.powi(31);
    (0..n).map(|i| T::from_f32(hash(i) * unit)).collect()
}

impl Case {
    /// `[B, L]` of the memory of keys and values.
    fn places(&self) -> [usize; 2] {
        let [x, y] = self.keys;
        match self.form {
            Form::Packed => [1, x + y],
            Form::Paged(size) => [x.div_ceil(size) + y.div_ceil(size), size],
            Form::Rolling(_) => [2, x.max(y)],
        }
    }

    /// Out, LSE, at each level.
    fn run<T: Element, C: Stored>(&self, levels: &[Level], trap: Trap) -> Vec<Vec<u32>> {
        let Self { form, queries, keys, heads: [hq, hk], d, .. } = *self;
        let [batch, axis] = self.places();
        let (shape, sizes) = ([batch, hk, axis, d], [batch, hk, axis, 1]);
        let k = Guarded::new(&numbers::<C>(shape.iter().product()), trap);
        let v = Guarded::new(&numbers::<C>(shape.iter().product()), trap);
        let scales = Guarded::new(&vec![0.01f32; sizes.iter().product()], trap);

        let starts = |[x, y]: [usize; 2]| Guarded::new(&[0, x, x + y], trap);
        let (of_queries, of_keys, lens) = (starts(queries), starts(keys), Guarded::new(&keys, trap));
        // Pages from the last to the first, whole pages last; behind those in use the table holds no number of
        // a page.
        let (mut table, mut next) = (Vec::new(), batch as u32);
        if let Form::Paged(size) = form {
            let width = keys[0].max(keys[1]).div_ceil(size);
            for len in keys {
                let row = table.len();
                table.resize(row + width, u32::MAX);
                for page in &mut table[row..][..len.div_ceil(size)] {
                    next -= 1;
                    *page = next;
                }
            }
        }
        let ring = if let Form::Rolling(keep) = form { axis.saturating_sub(keep) } else { 0 };
        let (table, firsts) = (Guarded::new(&table, trap), Guarded::new(&[ring / 3, 0], trap));
        let [k, v] = [&k, &v].map(|x| {
            let mut x = view(self.tokens_first, x, shape);
            if C::DTYPE == DType::I8 {
                x = x.scaled(view(self.tokens_first, &scales, sizes)).unwrap();
            }
            match form {
                Form::Packed => x.packed(&of_keys).unwrap(),
                Form::Paged(_) => x.paged(&table, &lens).unwrap(),
                Form::Rolling(keep) => x.rolling(keep, &firsts, &lens).unwrap(),
            }
        });

        let longest = queries[0].max(queries[1]);
        let [b, tokens] = if form == Form::Packed { [1, queries[0] + queries[1]] } else { [2, longest] };
        let q = Guarded::new(&numbers::<T>(b * tokens * hq * d), trap);
        let q_lens = Guarded::new(&queries, trap);
        let of_level = |&level: &Level| {
            let mut out = Guarded::new(&vec![T::from_f32(f32::NAN); b * tokens * hq * d], trap);
            let mut lse = Guarded::new(&vec![f32::NAN; b * tokens * hq], trap);
            let shape = [b, hq, tokens, d];
            let mut q = view(self.tokens_first, &q, shape);
            let mut to = view_mut(self.tokens_first, &mut out, shape);
            let mut attention = Attention::new().level(level).causal();
            if form == Form::Packed {
                (q, to) = (q.packed(&of_queries).unwrap(), to.packed(&of_queries).unwrap());
            } else {
                attention = attention.q_lens(&q_lens);
            }
            attention.run_with_lse(q, k, v, to, &mut lse).unwrap();
            let out: Vec<u32> = out.iter().map(|x| x.to_f32().to_bits()).collect();
            assert!(out.iter().all(|x| f32::from_bits(*x).is_finite()), "{level} {trap:?}: {self:?}");
            out.into_iter().chain(lse.iter().map(|x| x.to_bits())).collect()
        };
        levels.iter().map(of_level).collect()
    }
}

/// Lengths in pairs, each `step`-th one, in every form.
fn nothing_beside_is_touched<T: Element, C: Stored>(step: usize) {
    let levels: Vec<Level> = Level::available().collect();
    for i in (0..SIZES.len() * SIZES.len()).step_by(step) {
        let (x, y) = (SIZES[i % SIZES.len()], SIZES[i / SIZES.len()]);
        for form in [Form::Packed, Form::Paged([1, 3, 16][i % 3]), Form::Rolling([0, 1, 4][i % 3].min(x))] {
            let queries = if i % 2 == 0 { [1, 1] } else { [y.min(x), x.min(33).min(y)] };
            let heads = [[1, 1], [3, 1], [4, 2]][i % 3];
            let case =
                Case { form, queries, keys: [x, y], heads, d: SIZES[i * 7 % 13], tokens_first: i % 4 < 2 };
            println!("{} on {}: {case:?}", T::DTYPE, C::DTYPE); // seen after a crash, with --nocapture
            let ordinary = case.run::<T, C>(&levels, Trap::Nowhere);
            for trap in [Trap::Behind, Trap::Before] {
                assert!(case.run::<T, C>(&levels, trap) == ordinary, "{trap:?}: {case:?}");
            }
        }
    }
}

#[test]
fn of_f32() {
    nothing_beside_is_touched::<f32, f32>(2);
}

#[test]
fn of_halves() {
    nothing_beside_is_touched::<bf16, bf16>(3);
    nothing_beside_is_touched::<f16, f16>(5);
}

#[test]
fn of_integers() {
    nothing_beside_is_touched::<f32, i8>(5);
}
