//! Instructions of each kernel at levels `scalar` and `avx2`, counted by valgrind (which has no AVX-512): the
//! same in every run and under any load. `counts.txt` beside this file holds what they were, and
//! `.ci/counts.sh` fails where one has grown by more than 2 %.
//!
//! Shapes are chosen so that nearly all of a job is the part it is named after; each has run once before it is
//! counted, so that the memory it keeps is there. Needs valgrind, and the `gungraun-runner` of the same
//! version as the library.

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
mod jobs {
    use half::{bf16, f16};
    use headwise::layer::{Linear, Then, Weight, WeightLayout, Weights};
    use headwise::{
        Attention, CacheShape, Element, Error, KvCache, Level, Run, Stage, StatisticsOptions, Stored,
        Threads, View, ViewMut,
    };

    /// What is counted, with its memory.
    pub type Job = Box<dyn FnMut()>;

    /// A hash of the index (Knuth's multiplicative), in [-1, 1): no two rows alike.
    fn fill<T: Stored>(n: usize) -> Vec<T> {
        (0..n as u32)
            .map(|i| T::from_f32(i.wrapping_mul(2_654_435_761) as i32 as f32 / 2f32.powi(31)))
            .collect()
    }

    fn warm(mut job: impl FnMut() + 'static) -> Job {
        job();
        Box::new(job)
    }

    fn bhld<T: Stored>(data: &[T], shape: [usize; 4]) -> View<'_, T> {
        View::bhld(data, shape).expect("compact")
    }

    struct Sizes {
        lq: usize,
        lk: usize,
        d: usize,
        dv: usize,
    }

    /// A call on one head of one entry.
    fn on_head<T: Element>(
        sizes: Sizes,
        call: impl Fn([View<'_, T>; 3], ViewMut<'_, T>) -> Result<(), Error> + 'static,
    ) -> Job {
        let Sizes { lq, lk, d, dv } = sizes;
        let (q, k, v) = (fill::<T>(lq * d), fill::<T>(lk * d), fill::<T>(lk * dv));
        let mut out = vec![T::from_f32(0.0); lq * dv];
        warm(move || {
            let (q, k, v) = (bhld(&q, [1, 1, lq, d]), bhld(&k, [1, 1, lk, d]), bhld(&v, [1, 1, lk, dv]));
            let out = ViewMut::bhld(&mut out, [1, 1, lq, dv]).expect("compact");
            call([q, k, v], out).expect("valgrind has this level");
        })
    }

    fn attention<T: Element>(attention: Attention<'static>, sizes: Sizes) -> Job {
        on_head::<T>(sizes, move |[q, k, v], out| attention.run(q, k, v, out))
    }

    fn plain(level: Level) -> Attention<'static> {
        Attention::new().sequential().level(level)
    }

    /// Scores of many features, written out.
    pub fn score_tile(level: Level) -> Job {
        let (lq, lk, d) = (64, 128, 512);
        let (q, k, mut out) = (fill::<f32>(lq * d), fill::<f32>(lk * d), vec![0.0; lq * lk]);
        warm(move || {
            let (q, k) = (bhld(&q, [1, 1, lq, d]), bhld(&k, [1, 1, lk, d]));
            plain(level).scores(Stage::Scaled, q, k, 0..1, 0..lq, &mut out).expect("valgrind has this level");
        })
    }

    /// One feature of keys, many of values.
    pub fn value_tile(level: Level) -> Job {
        attention::<f32>(plain(level), Sizes { lq: 64, lk: 128, d: 1, dv: 512 })
    }

    /// One feature of either: what is left is the softmax.
    pub fn softmax(level: Level) -> Job {
        attention::<f32>(plain(level), Sizes { lq: 256, lk: 512, d: 1, dv: 1 })
    }

    /// One key: what is left is packing the queries and writing the output.
    pub fn pack(level: Level) -> Job {
        attention::<f32>(plain(level), Sizes { lq: 512, lk: 1, d: 128, dv: 128 })
    }

    /// The function by itself.
    pub fn exp(level: Level) -> Job {
        let mut x = fill::<f32>(1 << 14);
        warm(move || headwise_kernels::exp(level, &mut x).expect("valgrind has this level"))
    }

    const HEAD: Sizes = Sizes { lq: 192, lk: 256, d: 64, dv: 64 };

    pub fn head_f32(level: Level) -> Job {
        attention::<f32>(plain(level), HEAD)
    }

    pub fn head_f16(level: Level) -> Job {
        attention::<f16>(plain(level), HEAD)
    }

    pub fn head_bf16(level: Level) -> Job {
        attention::<bf16>(plain(level), HEAD)
    }

    pub fn head_causal(level: Level) -> Job {
        attention::<f32>(plain(level).causal(), HEAD)
    }

    /// The same head as `head_f32`, with its statistics and what its keys receive.
    pub fn statistics(level: Level) -> Job {
        let (attention, options) = (plain(level), StatisticsOptions::new().received());
        on_head::<f32>(HEAD, move |[q, k, v], out| {
            attention.run_with_statistics(q, k, v, out, &options).map(|_| ())
        })
    }

    /// Four query heads on one cache, one token.
    fn decode<C: Stored>(level: Level) -> Job {
        let (tokens, d) = (512, 128);
        let shape = CacheShape { batch: 1, heads: 1, capacity: tokens, d, dv: d };
        let mut cache = KvCache::<C>::new(shape).expect("small");
        let (q, kv, mut out) = (fill::<f32>(4 * d), fill::<f32>(tokens * d), vec![0.0; 4 * d]);
        cache.append(bhld(&kv, [1, 1, tokens, d]), bhld(&kv, [1, 1, tokens, d])).expect("room");
        warm(move || {
            let out = ViewMut::bhld(&mut out, [1, 4, 1, d]).expect("compact");
            let result = plain(level).run(bhld(&q, [1, 4, 1, d]), cache.keys(), cache.values(), out);
            result.expect("valgrind has this level");
        })
    }

    pub fn decode_f32(level: Level) -> Job {
        decode::<f32>(level)
    }

    pub fn decode_f16(level: Level) -> Job {
        decode::<f16>(level)
    }

    pub fn decode_bf16(level: Level) -> Job {
        decode::<bf16>(level)
    }

    pub fn decode_i8(level: Level) -> Job {
        decode::<i8>(level)
    }

    fn project<W: Weight>(level: Level, rows: usize) -> Job {
        let (inputs, outputs) = (256, 192);
        let weights = fill::<W>(inputs * outputs);
        let weights = Weights::pack(&weights, WeightLayout::OutIn, inputs, outputs).expect("fits");
        let linear = Linear::with_weights(weights, None).expect("fits");
        let (x, mut y) = (fill::<f32>(rows * inputs), vec![0.0; rows * outputs]);
        let run = Run { level: Some(level), threads: Threads::Calling };
        warm(move || linear.forward(&x, Then::Store, run, &mut y).expect("valgrind has this level"))
    }

    pub fn projection(level: Level) -> Job {
        project::<f32>(level, 48)
    }

    /// One token.
    pub fn projection_bf16(level: Level) -> Job {
        project::<bf16>(level, 1)
    }
}

#[cfg(target_os = "linux")]
mod counted {
    use gungraun::{library_benchmark, library_benchmark_group};
    use headwise::Level::{Avx2, Scalar};

    use super::jobs::*;

    #[library_benchmark]
    #[bench::score_tile(score_tile(Scalar))]
    #[bench::value_tile(value_tile(Scalar))]
    #[bench::softmax(softmax(Scalar))]
    #[bench::pack(pack(Scalar))]
    #[bench::exp(exp(Scalar))]
    #[bench::head_f32(head_f32(Scalar))]
    #[bench::head_f16(head_f16(Scalar))]
    #[bench::head_bf16(head_bf16(Scalar))]
    #[bench::head_causal(head_causal(Scalar))]
    #[bench::statistics(statistics(Scalar))]
    #[bench::decode_f32(decode_f32(Scalar))]
    #[bench::decode_f16(decode_f16(Scalar))]
    #[bench::decode_bf16(decode_bf16(Scalar))]
    #[bench::decode_i8(decode_i8(Scalar))]
    #[bench::projection(projection(Scalar))]
    #[bench::projection_bf16(projection_bf16(Scalar))]
    fn scalar(mut job: Job) -> Job {
        job();
        job
    }

    #[library_benchmark]
    #[bench::score_tile(score_tile(Avx2))]
    #[bench::value_tile(value_tile(Avx2))]
    #[bench::softmax(softmax(Avx2))]
    #[bench::pack(pack(Avx2))]
    #[bench::exp(exp(Avx2))]
    #[bench::head_f32(head_f32(Avx2))]
    #[bench::head_f16(head_f16(Avx2))]
    #[bench::head_bf16(head_bf16(Avx2))]
    #[bench::head_causal(head_causal(Avx2))]
    #[bench::statistics(statistics(Avx2))]
    #[bench::decode_f32(decode_f32(Avx2))]
    #[bench::decode_f16(decode_f16(Avx2))]
    #[bench::decode_bf16(decode_bf16(Avx2))]
    #[bench::decode_i8(decode_i8(Avx2))]
    #[bench::projection(projection(Avx2))]
    #[bench::projection_bf16(projection_bf16(Avx2))]
    fn avx2(mut job: Job) -> Job {
        job();
        job
    }

    library_benchmark_group!(name = levels, benchmarks = [scalar, avx2]);
}

#[cfg(target_os = "linux")]
use counted::levels;
#[cfg(target_os = "linux")]
gungraun::main!(library_benchmark_groups = levels);
