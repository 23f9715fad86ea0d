//! What the processor can do, for benches and tests: rates to hold the kernels against, and its functions by
//! themselves.

use crate::isa::Isa;
use crate::level::Op;
use crate::products::Products;
use crate::{Error, Level};

/// Multiply-adds in registers only: runs `24 * steps` vector operations and returns the floating-point
/// operations done (two a lane). Time it to get the peak.
///
/// # Errors
/// [`Error::LevelUnavailable`].
pub fn fma(level: Level, steps: usize) -> Result<f64, Error> {
    struct Fma(usize);
    impl Op for Fma {
        type Output = f64;
        #[inline(always)]
        fn run<I: Isa, const NQ: usize, const MR: usize>(self, isa: I) -> f64 {
            let (factor, term) = core::hint::black_box((0.999_999f32, 1e-6f32));
            let (factor, term) = (isa.splat_f32s(factor), isa.splat_f32s(term));
            let mut acc = [isa.splat_f32s(1.0); 12];
            for _ in 0..2 * self.0 {
                for acc in &mut acc {
                    *acc = isa.mul_add_e_f32s(*acc, factor, term);
                }
            }
            let sum = acc.into_iter().fold(isa.splat_f32s(0.0), |sum, x| isa.add_f32s(sum, x));
            core::hint::black_box(isa.reduce_sum_f32s(sum));
            (self.0 * 24 * I::F32_LANES * 2) as f64
        }
    }
    level.dispatch(Fma(steps))
}

/// The same with dot products of bf16 (four operations a lane), at levels whose products of bf16 are such; `None`
/// at others.
///
/// # Errors
/// [`Error::LevelUnavailable`].
pub fn dots(level: Level, steps: usize) -> Result<Option<f64>, Error> {
    struct Dots(usize);
    impl Op for Dots {
        type Output = Option<f64>;
        #[inline(always)]
        fn run<I: Isa, const NQ: usize, const MR: usize>(self, isa: I) -> Option<f64> {
            if !I::DOTS {
                return None;
            }
            let pair = isa.splat_f32s(core::hint::black_box(f32::from_bits(0x3f80_3f80)));
            let mut acc = [isa.splat_f32s(1.0); 12];
            for _ in 0..2 * self.0 {
                for acc in &mut acc {
                    // SAFETY: made for levels that have dots.
                    *acc = unsafe { isa.dot(*acc, pair, pair) };
                }
            }
            let sum = acc.into_iter().fold(isa.splat_f32s(0.0), |sum, x| isa.add_f32s(sum, x));
            core::hint::black_box(isa.reduce_sum_f32s(sum));
            Some((self.0 * 24 * I::F32_LANES * 4) as f64)
        }
    }
    match level.products() {
        Products::Dots => level.dispatch(Dots(steps)),
        _ => Ok(None),
    }
}

/// How far [`read`] looks ahead, in f32: 8 KiB.
const AHEAD: usize = 2048;

/// Reads all of `data` once, in order, and returns the sum: time it to get the read rate. With `ahead` it
/// asks for each cache line some KiB before it gets there, otherwise the processor has to guess: which is
/// faster depends on the machine, and on where `data` lies.
///
/// # Errors
/// [`Error::LevelUnavailable`].
pub fn read(level: Level, data: &[f32], ahead: bool) -> Result<f32, Error> {
    struct Read<'a>(&'a [f32], bool);
    impl Op for Read<'_> {
        type Output = f32;
        #[inline(always)]
        fn run<I: Isa, const NQ: usize, const MR: usize>(self, isa: I) -> f32 {
            let Self(data, ahead) = self;
            let (vectors, tail) = I::as_simd_f32s(data);
            let (blocks, rest) = vectors.as_chunks::<8>();
            let mut acc = [isa.splat_f32s(0.0); 8];
            for block in blocks {
                if ahead {
                    let next = block.as_ptr().cast::<f32>().wrapping_add(AHEAD);
                    for line in (0..8 * I::F32_LANES).step_by(16) {
                        isa.prefetch(next.wrapping_add(line).cast());
                    }
                }
                for (acc, x) in acc.iter_mut().zip(block) {
                    *acc = isa.add_f32s(*acc, *x);
                }
            }
            let sum = acc.iter().chain(rest).fold(isa.splat_f32s(0.0), |sum, x| isa.add_f32s(sum, *x));
            isa.reduce_sum_f32s(sum) + tail.iter().sum::<f32>()
        }
    }
    level.dispatch(Read(data, ahead))
}

/// `exp` of every element, in place, as the kernel for few rows computes it: within 2 ulp up to 88, exactly 0
/// where the result is not a normal number.
///
/// # Errors
/// [`Error::LevelUnavailable`].
pub fn exp(level: Level, x: &mut [f32]) -> Result<(), Error> {
    level.dispatch(Map { x, function: Function::Exp })
}

/// `4^x` of every element, in place, as the kernels compute it: within 2 ulp up to 63, exactly 0 where the
/// result is not a normal number.
///
/// # Errors
/// [`Error::LevelUnavailable`].
pub fn power_of_4(level: Level, x: &mut [f32]) -> Result<(), Error> {
    level.dispatch(Map { x, function: Function::PowerOf4 })
}

/// `tanh` of every element, in place, as the kernels compute it: within 3 ulp.
///
/// # Errors
/// [`Error::LevelUnavailable`].
pub fn tanh(level: Level, x: &mut [f32]) -> Result<(), Error> {
    level.dispatch(Map { x, function: Function::Tanh })
}

/// `ln` of every element, in place, as the kernels compute it: within 2 ulp for normal numbers above 0.
///
/// # Errors
/// [`Error::LevelUnavailable`].
pub fn ln(level: Level, x: &mut [f32]) -> Result<(), Error> {
    level.dispatch(Map { x, function: Function::Ln })
}

#[derive(Clone, Copy)]
enum Function {
    Exp,
    PowerOf4,
    Tanh,
    Ln,
}

impl Function {
    #[inline(always)]
    fn of<I: Isa>(self, isa: I, x: I::f32s) -> I::f32s {
        match self {
            Function::Exp => crate::exp::exp(isa, x),
            Function::PowerOf4 => isa.power_of_4(x),
            Function::Tanh => crate::exp::tanh(isa, x),
            Function::Ln => crate::exp::ln(isa, x),
        }
    }
}

struct Map<'a> {
    x: &'a mut [f32],
    function: Function,
}

impl Op for Map<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa, const NQ: usize, const MR: usize>(self, isa: I) {
        let (vectors, tail) = I::as_mut_simd_f32s(self.x);
        for x in vectors {
            *x = self.function.of(isa, *x);
        }
        for x in tail {
            *x = isa.reduce_max_f32s(self.function.of(isa, isa.splat_f32s(*x)));
        }
    }
}
