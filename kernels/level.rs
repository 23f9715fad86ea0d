//! Levels: the instruction sets a kernel exists for, and the one place where code is chosen by them.

use core::fmt;
use core::str::FromStr;
#[cfg(target_arch = "x86_64")]
use std::sync::OnceLock;

use pulp::NullaryFnOnce;

use crate::isa::Isa;
use crate::products::Products;
use crate::{Error, tiles};

/// An instruction set that the kernels are compiled for. The kernels behind all levels compute the same
/// formula; they differ in rounding only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Level {
    /// No explicit vector instructions: what the baseline of the target offers.
    Scalar,
    /// x86-64 with AVX2 and FMA: 8 lanes, 16 registers.
    Avx2,
    /// x86-64 with AVX-512 F, BW, CD, DQ and VL: 16 lanes, 32 registers.
    Avx512,
    /// AArch64 with NEON: 4 lanes, 32 registers.
    Neon,
    /// x86-64 with AVX-512 and its dot products of bf16. Where Q, K and V are bf16 and query rows many the
    /// products are made of these, for which the weights are rounded to bf16; all else is [`Level::Avx512`].
    Avx512Bf16,
    /// AArch64 with NEON and its dot products of bf16: the same, and all else is [`Level::Neon`].
    NeonBf16,
    /// x86-64 with AVX-512 and AMX, on Linux: as [`Level::Avx512Bf16`], but that the products run in tiles.
    Amx,
}

impl Level {
    /// Every level, whether this processor has it or not.
    pub const ALL: [Level; 7] = [
        Level::Scalar,
        Level::Avx2,
        Level::Avx512,
        Level::Neon,
        Level::Avx512Bf16,
        Level::NeonBf16,
        Level::Amx,
    ];

    /// The best level of this processor. Intel's is not [`Level::Avx512Bf16`]: measured, an Emerald Rapids does
    /// half as much in dot products as in multiply-adds (and AMD's Zen 4 twice as much).
    pub fn detect() -> Self {
        let good = |level: &Self| *level != Level::Avx512Bf16 || !is_intel();
        Self::available().filter(good).last().unwrap_or(Level::Scalar)
    }

    /// The levels of this processor, in the order of [`Level::ALL`].
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|level| level.is_available())
    }

    /// Whether this processor has the level.
    pub fn is_available(self) -> bool {
        struct Nothing;
        impl Op for Nothing {
            type Output = ();
            #[inline(always)]
            fn run<I: Isa, const NQ: usize, const MR: usize>(self, _: I) {}
        }
        self.dispatch(Nothing).is_ok()
    }

    /// `scalar`, `avx2`, `avx512`, `neon`, `avx512bf16`, `neonbf16` or `amx`: the name in options, logs and tables.
    pub fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
            Level::Neon => "neon",
            Level::Avx512Bf16 => "avx512bf16",
            Level::NeonBf16 => "neonbf16",
            Level::Amx => "amx",
        }
    }

    /// This level without its products of bf16.
    pub fn exact(self) -> Self {
        match self {
            Level::Avx512Bf16 | Level::Amx => Level::Avx512,
            Level::NeonBf16 => Level::Neon,
            level => level,
        }
    }

    /// What products of bf16 are made of.
    pub(crate) fn products(self) -> Products {
        match self {
            Level::Avx512Bf16 | Level::NeonBf16 => Products::Dots,
            Level::Amx => Products::Tiles,
            _ => Products::MultiplyAdds,
        }
    }

    /// How f16 are widened, where that depends on the processor: by F16C or, without it, one by one.
    pub fn widens_f16(self) -> Option<&'static str> {
        match self {
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 if crate::isa::has_f16c() => Some("F16C"),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => Some("no F16C"),
            _ => None,
        }
    }

    /// The register tile: query rows, and keys (or value features) beside them.
    ///
    /// # Errors
    /// [`Error::LevelUnavailable`].
    pub fn tile(self) -> Result<[usize; 2], Error> {
        struct Shape;
        impl Op for Shape {
            type Output = [usize; 2];
            #[inline(always)]
            fn run<I: Isa, const NQ: usize, const MR: usize>(self, _: I) -> [usize; 2] {
                [NQ * I::F32_LANES, MR]
            }
        }
        self.dispatch(Shape)
    }

    /// f32 in a vector.
    ///
    /// # Errors
    /// [`Error::LevelUnavailable`].
    pub(crate) fn lanes(self) -> Result<usize, Error> {
        struct Lanes;
        impl Op for Lanes {
            type Output = usize;
            #[inline(always)]
            fn run<I: Isa, const NQ: usize, const MR: usize>(self, _: I) -> usize {
                I::F32_LANES
            }
        }
        self.dispatch(Lanes)
    }

    /// Query rows on a key/value head up to which the kernel for few rows is the faster one: against 4096
    /// keys of 128 features the two cost the same at 14 rows (AVX-512) and 7 (AVX2).
    ///
    /// # Errors
    /// [`Error::LevelUnavailable`].
    pub fn few_rows(self) -> Result<usize, Error> {
        Ok((self.lanes()? * 3 / 4).max(4))
    }

    /// Runs `op` compiled for this level: the one match.
    #[inline]
    pub(crate) fn dispatch<O: Op>(self, op: O) -> Result<O::Output, Error> {
        #[allow(unused_variables, reason = "each target uses some of the arms")]
        let unavailable = Error::LevelUnavailable { level: self };
        match self {
            Level::Scalar => Ok(scalar::run(op)),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => pulp::x86::V3::try_new().map(|isa| avx2::run(isa, op)).ok_or(unavailable),
            Level::Amx if !tiles::available() => Err(unavailable),
            Level::Avx512Bf16 | Level::NeonBf16 if !has_dots() => Err(unavailable),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Avx512Bf16 | Level::Amx => {
                pulp::x86::V4::try_new().map(|isa| avx512::run(isa, op)).ok_or(unavailable)
            }
            #[cfg(target_arch = "aarch64")]
            Level::Neon | Level::NeonBf16 => {
                pulp::aarch64::Neon::try_new().map(|isa| neon::run(isa, op)).ok_or(unavailable)
            }
            #[allow(unreachable_patterns)]
            _ => Err(unavailable),
        }
    }
}

/// Whether the processor has dot products of bf16 in the registers of its best level.
fn has_dots() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::is_x86_feature_detected!("avx512bf16");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("bf16");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return false;
}

/// Whether the processor is Intel's.
fn is_intel() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        // Asked once: a virtual machine may take microseconds to answer.
        static INTEL: OnceLock<bool> = OnceLock::new();
        *INTEL.get_or_init(|| {
            let id = core::arch::x86_64::__cpuid(0);
            [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
        })
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

// A module for each level, as the compiler works side by side on what comes from different modules: with one
// function for all levels the crate takes twice as long on two cores. The two numbers are the register tile,
// `NQ` vectors of queries by `MR` keys or features; the bench `attention` chose them.

mod scalar {
    use super::{NullaryFnOnce, Op, Run};

    /// One lane a vector: 8 of them side by side are what LLVM turns into two SSE registers.
    pub(super) fn run<O: Op>(op: O) -> O::Output {
        Run::<_, _, 8, 4>(pulp::Scalar, op).call()
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{Op, Run};

    /// 12 accumulators, 2 query vectors and a broadcast: 15 of 16 registers. 3x4 spills.
    pub(super) fn run<O: Op>(isa: pulp::x86::V3, op: O) -> O::Output {
        crate::isa::has_f16c(); // looks once, for what loads f16
        isa.vectorize(Run::<_, _, 2, 6>(isa, op))
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::{Op, Run};

    /// 24 accumulators, 4 query vectors: 10 loads a step. 2x12 takes 14, and is 3 % slower.
    pub(super) fn run<O: Op>(isa: pulp::x86::V4, op: O) -> O::Output {
        isa.vectorize(Run::<_, _, 4, 6>(isa, op))
    }
}

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::{Op, Run};

    pub(super) fn run<O: Op>(isa: pulp::aarch64::Neon, op: O) -> O::Output {
        isa.vectorize(Run::<_, _, 4, 6>(isa, op))
    }
}

/// Something to run at a level.
pub(crate) trait Op {
    type Output;
    /// Must be `#[inline(always)]`, like all that it calls: only code inlined into `vectorize` may use the
    /// level's instructions.
    fn run<I: Isa, const NQ: usize, const MR: usize>(self, isa: I) -> Self::Output;
}

struct Run<I, O, const NQ: usize, const MR: usize>(I, O);

impl<I: Isa, O: Op, const NQ: usize, const MR: usize> NullaryFnOnce for Run<I, O, NQ, MR> {
    type Output = O::Output;
    #[inline(always)]
    fn call(self) -> O::Output {
        self.1.run::<I, NQ, MR>(self.0)
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Level {
    type Err = Error;
    fn from_str(name: &str) -> Result<Self, Error> {
        Self::ALL
            .into_iter()
            .find(|level| level.name() == name)
            .ok_or_else(|| Error::UnknownLevel { name: name.to_string() })
    }
}
