//! Layouts beside compact heads, and remainders beside round sizes: calls on one thread in turns, one of each
//! after another; medians. Inputs lie on large pages where malloc asks for them
//! (`GLIBC_TUNABLES=glibc.malloc.hugetlb=1`), each from the start of a page on.
//!
//! `cargo bench --bench layouts -- avx2 scalar` takes levels; without any, all of this machine.

use std::ops::{Deref, DerefMut};
use std::time::Instant;

use headwise::{Attention, Error, Level, View, ViewMut};

/// Where the tokens of a head lie.
#[derive(Clone, Copy, PartialEq)]
enum Layout {
    /// `[B, H, L, D]`
    Heads,
    /// `[B, L, H, D]`
    Tokens,
    /// Q, K and V beside each other in `[B, L, 3, H, D]`, the result of one projection; the output as above.
    Fused,
}

/// Self-attention of `lq` tokens on `lk`, of as many heads and entries as make the call long enough.
#[derive(Clone, Copy)]
struct Shape {
    b: usize,
    h: usize,
    lq: usize,
    lk: usize,
    d: usize,
}

/// A call with memory of its own.
struct Call {
    shape: Shape,
    layout: Layout,
    /// Q, K, V, or all of them in the first.
    inputs: [Memory; 3],
    out: Memory,
    seconds: Vec<f64>,
}

/// Numbers from the start of a large page on.
struct Memory {
    room: Vec<f32>,
    start: usize,
}

const PAGE: usize = 2 << 20;

/// Rounds at least, and seconds that they take together at least.
const ROUNDS: usize = 15;
const SECONDS: f64 = 0.3;

fn main() {
    let asked: Vec<Level> = std::env::args().filter_map(|name| name.parse().ok()).collect();
    let levels = if asked.is_empty() { Level::available().collect() } else { asked };
    for level in levels {
        // Of f32 inputs, and so the same kernels as of the exact level.
        if level != level.exact() {
            continue;
        }
        println!("{level}: rows apart / compact");
        println!("{:>26} {:>9} {:>9} {:>7} {:>7}", "", "floats", "GFLOP/s", "tokens", "fused");
        for (h, d) in [(6, 64), (12, 32), (12, 64), (24, 32), (32, 128), (64, 64)] {
            for l in [64, 128, 197, 512, 2048] {
                let b = (512 * 512 / (l * l * h)).max(1);
                if h * l * l * d <= 12 * 2048 * 2048 * 64 {
                    layouts(level, Shape { b, h, lq: l, lk: l, d });
                }
            }
        }
        let round = Shape { b: 4, h: 12, lq: 128, lk: 128, d: 64 };
        let sizes = [16, 17, 32, 33, 48, 64, 65, 77, 80, 96, 127, 128, 129];
        remainders(level, "Lq", &sizes, |lq| Shape { lq, lk: 512, b: 1, ..round });
        remainders(level, "Lk", &sizes, |lk| Shape { lk, ..round });
        remainders(level, "D", &[24, 32, 40, 48, 64, 72, 80, 96, 112, 128], |d| Shape { d, ..round });
    }
}

/// One line: the shape as compact heads, and the speed in other layouts, in times of that.
fn layouts(level: Level, shape: Shape) {
    let mut calls = [Layout::Heads, Layout::Tokens, Layout::Fused].map(|layout| Call::new(shape, layout));
    let [heads, tokens, fused] = measure(level, &mut calls)[..] else { return };
    let Shape { b, h, lq, d, .. } = shape;
    let name = format!("{b} x {h} heads, L {lq}, D {d}");
    let rate = shape.flop() / heads / 1e9;
    println!("{name:>26} {:>9} {rate:>9.1} {:>7.3} {:>7.3}", h * d, heads / tokens, heads / fused);
}

/// One line: GFLOP/s at each size.
fn remainders(level: Level, axis: &str, sizes: &[usize], shape: impl Fn(usize) -> Shape) {
    let mut calls: Vec<_> = sizes.iter().map(|&size| Call::new(shape(size), Layout::Heads)).collect();
    let seconds = measure(level, &mut calls);
    print!("{axis} (GFLOP/s):");
    for ((size, call), seconds) in sizes.iter().zip(&calls).zip(seconds) {
        print!("  {size}: {:.1}", call.shape.flop() / seconds / 1e9);
    }
    println!();
}

/// The median time of each, in turns.
fn measure(level: Level, calls: &mut [Call]) -> Vec<f64> {
    let start = Instant::now();
    let mut rounds = 0;
    while rounds < ROUNDS || start.elapsed().as_secs_f64() < SECONDS {
        for call in &mut *calls {
            // Once to fetch its memory, once by the clock.
            call.run(level).expect("a valid call");
            let start = Instant::now();
            call.run(level).expect("a valid call");
            call.seconds.push(start.elapsed().as_secs_f64());
        }
        rounds += 1;
    }
    let median = |call: &mut Call| {
        call.seconds.sort_by(f64::total_cmp);
        call.seconds[call.seconds.len() / 2]
    };
    calls.iter_mut().map(median).collect()
}

impl Shape {
    fn flop(&self) -> f64 {
        (4 * self.b * self.h * self.lq * self.lk * self.d) as f64
    }
}

impl Call {
    fn new(shape: Shape, layout: Layout) -> Self {
        let Shape { b, h, lq, lk, d } = shape;
        let sizes = if layout == Layout::Fused { [3 * lq, 0, 0] } else { [lq, lk, lk] };
        let inputs = sizes.map(|rows| Memory::new(b * h * rows * d));
        Self { shape, layout, inputs, out: Memory::new(b * h * lq * d), seconds: Vec::new() }
    }

    fn run(&mut self, level: Level) -> Result<(), Error> {
        let Shape { b, h, lq, lk, d } = self.shape;
        let ([q, k, v], out) = (&self.inputs, &mut self.out);
        let attention = Attention::new().sequential().level(level);
        match self.layout {
            Layout::Heads => {
                let (q, out) = (View::bhld(q, [b, h, lq, d])?, ViewMut::bhld(out, [b, h, lq, d])?);
                attention.run(q, View::bhld(k, [b, h, lk, d])?, View::bhld(v, [b, h, lk, d])?, out)
            }
            Layout::Tokens => {
                let (q, out) = (View::blhd(q, [b, lq, h, d])?, ViewMut::blhd(out, [b, lq, h, d])?);
                attention.run(q, View::blhd(k, [b, lk, h, d])?, View::blhd(v, [b, lk, h, d])?, out)
            }
            Layout::Fused => {
                let strides = [lq * 3 * h * d, d, 3 * h * d, 1].map(|stride| stride as isize);
                let part = |part: usize| View::new(q, part * h * d, [b, h, lq, d], strides);
                attention.run(part(0)?, part(1)?, part(2)?, ViewMut::blhd(out, [b, lq, h, d])?)
            }
        }
    }
}

impl Memory {
    /// A hash of the index (Knuth's multiplicative), in [-1, 1).
    fn new(n: usize) -> Self {
        let mut room = vec![0.0; n + PAGE / size_of::<f32>()];
        let start = room.as_ptr().align_offset(PAGE);
        room.truncate(start + n);
        for (i, x) in (0u32..).zip(&mut room[start..]) {
            *x = i.wrapping_mul(2_654_435_761) as i32 as f32 / 2f32.powi(31);
        }
        Self { room, start }
    }
}

impl Deref for Memory {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.room[self.start..]
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.room[self.start..]
    }
}
