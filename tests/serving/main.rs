//! What a server asks for: sequences side by side, caches in pages, one query against a long cache.
//!
//! Where tokens lie changes no bit, nor does the number of threads: packed and paged calls are held against
//! plain ones of the same lengths, for equality; plain ones against the reference.

mod decode;
mod packed;
mod paged;
mod spans;

use std::sync::OnceLock;

use headwise::reference::Reference;
use headwise::{Attention, Level, Position, Terms, View, ViewMut};
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Output, compact `[B, Hq, Lq, Dv]`, and LSE.
type Answer = (Vec<f32>, Vec<f32>);

fn levels() -> impl Iterator<Item = Level> {
    Level::available()
}

fn pools() -> &'static [ThreadPool] {
    static POOLS: OnceLock<Vec<ThreadPool>> = OnceLock::new();
    let pool = |threads| ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
    POOLS.get_or_init(|| [1, 2, 3].map(pool).into())
}

/// Calls `f` in each pool.
fn on_threads(f: impl Fn(&str) + Sync) {
    for pool in pools() {
        pool.install(|| f(&format!("{} threads", pool.current_num_threads())));
    }
}

/// `n` numbers below `below`, others for another seed.
fn numbers(seed: u64, n: usize, below: usize) -> Vec<usize> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((u128::from(state) * below as u128) >> 64) as usize
    };
    (0..n).map(next).collect()
}

/// Uniform in [-1, 1).
fn uniform(seed: u64, n: usize) -> Vec<f32> {
    numbers(seed, n, 1 << 24).into_iter().map(|x| x as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn bhld<T>(data: &[T], shape: [usize; 4]) -> View<'_, T> {
    View::bhld(data, shape).expect("compact")
}

fn run<'a>(terms: Terms<'a>, level: Level, q: View<'a, f32>, k: View<'a, f32>, v: View<'a, f32>) -> Answer {
    let ([b, h, l, _], dv) = (q.shape(), v.shape()[3]);
    let (mut out, mut lse) = (vec![f32::NAN; b * h * l * dv], vec![f32::NAN; b * h * l]);
    let view = ViewMut::bhld(&mut out, [b, h, l, dv]).expect("compact");
    let attention = Attention::with_terms(terms).level(level);
    attention.run_with_lse(q, k, v, view, &mut lse).expect("a valid call");
    (out, lse)
}

/// What the plan says.
fn plan<'a>(terms: Terms<'a>, level: Level, q: View<'a, f32>, k: View<'a, f32>, v: View<'a, f32>) -> String {
    Attention::with_terms(terms).level(level).plan(q, k, v).expect("a valid call").describe()
}

/// The terms for one batch entry. Mask and bias must not differ between them.
fn only<'a>(terms: &Terms<'a>, b: usize) -> Terms<'a> {
    let position = match terms.position {
        Position::Each(offsets) => Position::Each(&offsets[b..b + 1]),
        position => position,
    };
    let one = |lens: &'a [usize]| &lens[b..b + 1];
    Terms { position, kv_lens: terms.kv_lens.map(one), q_lens: terms.q_lens.map(one), ..*terms }
}

/// The same bits; any NaN is like any other.
#[track_caller]
fn same(what: &str, got: &Answer, want: &Answer) {
    for (name, got, want) in [("out", &got.0, &want.0), ("lse", &got.1, &want.1)] {
        assert_eq!(got.len(), want.len(), "{what}: {name}");
        let differ = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan());
        if let Some(at) = got.iter().zip(want).position(differ) {
            panic!("{what}: {name}[{at}] is {:e}, not {:e}", got[at], want[at]);
        }
    }
}

/// Within 2e-6 (an LSE relatively, above 1): the error budget of inputs in [-1, 1]. No NaN.
#[track_caller]
fn near(what: &str, got: &Answer, want: [&[f64]; 2]) {
    for (name, got, want) in [("out", &got.0, want[0]), ("lse", &got.1, want[1])] {
        assert_eq!(got.len(), want.len(), "{what}: {name}");
        let close = |(&a, &b): (&f32, &f64)| {
            let a = f64::from(a);
            a == b || (a - b).abs() <= 2e-6 * if name == "lse" { b.abs().max(1.0) } else { 1.0 }
        };
        if let Some(at) = got.iter().zip(want).position(|pair| !close(pair)) {
            panic!("{what}: {name}[{at}] is {:e}, not {:e}", got[at], want[at]);
        }
    }
}

fn parts(reference: &Reference) -> [&[f64]; 2] {
    [&reference.out, &reference.lse]
}

/// Sequences of different lengths, side by side: `[tokens, H, features]`, or `[H, tokens, features]`.
struct Tensor {
    data: Vec<f32>,
    starts: Vec<usize>,
    heads: usize,
    features: usize,
    head_major: bool,
}

impl Tensor {
    fn new(seed: u64, lens: &[usize], heads: usize, features: usize, head_major: bool) -> Self {
        let ends = lens.iter().scan(0, |end, len| {
            *end += len;
            Some(*end)
        });
        let starts: Vec<usize> = [0].into_iter().chain(ends).collect();
        let data = uniform(seed, starts[lens.len()] * heads * features);
        Self { data, starts, heads, features, head_major }
    }

    fn lens(&self) -> Vec<usize> {
        self.starts.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    fn longest(&self) -> usize {
        self.lens().into_iter().max().unwrap_or(0)
    }

    fn total(&self) -> usize {
        *self.starts.last().expect("at least the 0")
    }

    fn strides(&self) -> [isize; 4] {
        let [head, token] = if self.head_major { [self.total(), 1] } else { [1, self.heads] };
        [0, (head * self.features) as isize, (token * self.features) as isize, 1]
    }

    fn shape(&self, tokens: usize) -> [usize; 4] {
        [1, self.heads, tokens, self.features]
    }

    /// All of them.
    fn packed(&self) -> View<'_, f32> {
        let all = View::new(&self.data, 0, self.shape(self.total()), self.strides()).expect("inside");
        all.packed(&self.starts).expect("rising")
    }

    /// Where a packed output goes.
    fn packed_mut(&mut self) -> ViewMut<'_, f32> {
        let (shape, strides) = (self.shape(self.total()), self.strides());
        let all = ViewMut::new(&mut self.data, 0, shape, strides).expect("inside");
        all.packed(&self.starts).expect("rising")
    }

    /// One of them, as if it were alone.
    fn one(&self, b: usize) -> View<'_, f32> {
        let len = self.lens()[b];
        let offset = if len == 0 { 0 } else { self.starts[b] * self.strides()[2] as usize };
        View::new(&self.data, offset, self.shape(len), self.strides()).expect("inside")
    }

    /// `[B, H, longest, features]` with NaN behind each sequence.
    fn padded(&self) -> Vec<f32> {
        let (longest, d) = (self.longest(), self.features);
        let mut padded = vec![f32::NAN; self.lens().len() * self.heads * longest * d];
        for (row, to) in padded.chunks_exact_mut(d).enumerate() {
            let (b, h, token) = (row / (self.heads * longest), row / longest % self.heads, row % longest);
            if token < self.lens()[b] {
                to.copy_from_slice(&self.row(b, h, token));
            }
        }
        padded
    }

    fn row(&self, b: usize, head: usize, token: usize) -> Vec<f32> {
        let one = self.one(b);
        (0..self.features).map(|c| one.get([0, head, token, c]).expect("inside")).collect()
    }
}

/// A packed call: the answer of each sequence.
fn run_packed<'a>(
    terms: Terms<'a>,
    level: Level,
    q: &'a Tensor,
    k: View<'a, f32>,
    v: View<'a, f32>,
) -> Vec<Answer> {
    let (lens, total, nan) = (q.lens(), q.total(), f32::NAN);
    let mut out = Tensor::new(0, &lens, q.heads, v.shape()[3], q.head_major);
    out.data.fill(nan);
    let mut lse = vec![nan; q.heads * total];
    let attention = Attention::with_terms(terms).level(level);
    attention.run_with_lse(q.packed(), k, v, out.packed_mut(), &mut lse).expect("a valid call");
    let answer = |b: usize| {
        let rows: Vec<[usize; 2]> = (0..q.heads).flat_map(|h| (0..lens[b]).map(move |i| [h, i])).collect();
        let out = rows.iter().flat_map(|&[h, i]| out.row(b, h, i)).collect();
        (out, rows.iter().map(|&[h, i]| lse[h * total + q.starts[b] + i]).collect())
    };
    (0..lens.len()).map(answer).collect()
}

/// The same sequences one by one.
fn run_alone<'a>(terms: &Terms<'a>, level: Level, [q, k, v]: [&'a Tensor; 3]) -> Vec<Answer> {
    let one = |b| run(only(terms, b), level, q.one(b), k.one(b), v.one(b));
    (0..q.lens().len()).map(one).collect()
}

#[track_caller]
fn same_each(what: &str, got: &[Answer], want: &[Answer]) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (b, (got, want)) in got.iter().zip(want).enumerate() {
        same(&format!("{what}, sequence {b}"), got, want);
    }
}

/// Sequences in pages: in no order, equal ones shared, with garbage wherever none should be looked at.
struct Pool {
    data: Vec<f32>,
    shape: [usize; 4],
    tokens_first: bool,
    table: Vec<u32>,
    lens: Vec<usize>,
    /// Pages in use.
    used: usize,
}

impl Pool {
    fn new(tensor: &Tensor, size: usize, tokens_first: bool) -> Self {
        let (lens, h, d) = (tensor.lens(), tensor.heads, tensor.features);
        let width = tensor.longest().div_ceil(size) + 2;
        let pages = lens.iter().map(|len| len.div_ceil(size)).sum::<usize>() + 3;
        let mut order: Vec<usize> = (0..pages).collect();
        for (at, other) in numbers(size as u64, pages, pages).into_iter().enumerate() {
            order.swap(at, other);
        }
        let (mut table, mut contents): (_, Vec<Vec<f32>>) = (vec![u32::MAX; lens.len() * width], Vec::new());
        for (b, &len) in lens.iter().enumerate() {
            for (at, start) in (0..len).step_by(size).enumerate() {
                let tokens = start..len.min(start + size);
                let full = tokens.len() == size;
                let place = |i: usize| if tokens_first { [i % h, i / h] } else { [i / size, i % size] };
                let row = |[head, token]: [usize; 2]| match tokens.contains(&(start + token)) {
                    true => tensor.row(b, head, start + token),
                    false => vec![f32::NAN; d],
                };
                let content: Vec<f32> = (0..h * size).map(place).flat_map(row).collect();
                let known = contents.iter().position(|known| full && *known == content);
                let number = known.unwrap_or_else(|| {
                    contents.push(content);
                    contents.len() - 1
                });
                table[b * width + at] = order[number] as u32;
            }
        }
        let mut data = vec![f32::NAN; pages * h * size * d];
        for (content, &page) in contents.iter().zip(&order) {
            data[page * h * size * d..][..content.len()].copy_from_slice(content);
        }
        let shape = if tokens_first { [pages, size, h, d] } else { [pages, h, size, d] };
        Self { data, shape, tokens_first, table, lens, used: contents.len() }
    }

    fn view(&self) -> View<'_, f32> {
        let pool = if self.tokens_first { View::blhd } else { View::bhld };
        let pool = pool(&self.data, self.shape).expect("compact");
        pool.paged(&self.table, &self.lens).expect("pages that are there")
    }
}
