//! Element types of Q, K, V and the output. A type is how it is loaded and stored; the arithmetic is f32.

use half::{bf16, f16};

use crate::decode::Decode;
use crate::isa::Isa;
use crate::map::Map;
use crate::prefill::Prefill;
use crate::split::{ScoresTask, Task};
use crate::{Error, Level, Scratch};

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// A type that Q, K, V and the output can have: `f32`, and `half`'s `f16` and `bf16`.
#[allow(private_bounds)]
pub trait Element: Copy + Default + Send + Sync + core::fmt::Debug + sealed::Sealed + Lanes {
    /// `f32`, `f16` or `bf16`: the name in tables and file formats.
    const NAME: &'static str;
    /// The exact value.
    fn to_f32(self) -> f32;
    /// The nearest value, ties to even; NaN stays NaN.
    fn from_f32(x: f32) -> Self;
}

/// What the kernels do with a type. The last three are where they are compiled: once for each type, in this
/// crate, and not again in every crate that calls them.
pub(crate) trait Lanes: Sized {
    /// Whether the kernels for many rows read it where it lies; other types are widened block by block.
    const IS_F32: bool;
    /// Loads a vector.
    ///
    /// # Safety
    /// `ptr` must be valid for reading `I::F32_LANES` elements.
    unsafe fn load<I: Isa>(isa: I, ptr: *const Self) -> I::f32s;
    /// Stores a vector.
    ///
    /// # Safety
    /// `ptr` must be valid for writing `I::F32_LANES` elements.
    unsafe fn store<I: Isa>(isa: I, ptr: *mut Self, x: I::f32s);
    /// Computes a task of many query rows.
    fn prefill(task: Task<'_, Self>, level: Level, scratch: &mut Scratch) -> Result<(), Error>;
    /// Computes a task of few query rows.
    fn decode(task: Task<'_, Self>, level: Level, scratch: &mut Scratch) -> Result<(), Error>;
    /// Writes the scores of a task.
    fn scores(task: ScoresTask<'_, Self>, level: Level, scratch: &mut Scratch) -> Result<(), Error>;
}

/// The kernels for the type.
macro_rules! compiled_here {
    () => {
        #[inline(never)]
        fn prefill(task: Task<'_, Self>, level: Level, scratch: &mut Scratch) -> Result<(), Error> {
            level.dispatch(Prefill { task, scratch })
        }
        #[inline(never)]
        fn decode(task: Task<'_, Self>, level: Level, scratch: &mut Scratch) -> Result<(), Error> {
            level.dispatch(Decode { task, scratch })
        }
        #[inline(never)]
        fn scores(task: ScoresTask<'_, Self>, level: Level, scratch: &mut Scratch) -> Result<(), Error> {
            level.dispatch(Map { task, scratch })
        }
    };
}

impl Element for f32 {
    const NAME: &'static str = "f32";
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }
}

impl Lanes for f32 {
    const IS_F32: bool = true;
    #[inline(always)]
    unsafe fn load<I: Isa>(_: I, ptr: *const f32) -> I::f32s {
        // SAFETY: the caller's; vectors are plain old data.
        unsafe { ptr.cast::<I::f32s>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store<I: Isa>(_: I, ptr: *mut f32, x: I::f32s) {
        // SAFETY: the caller's.
        unsafe { ptr.cast::<I::f32s>().write_unaligned(x) }
    }
    compiled_here!();
}

impl Element for f16 {
    const NAME: &'static str = "f16";
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self.to_f32_const()
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f16 {
        f16::from_f32_const(x)
    }
}

impl Lanes for f16 {
    const IS_F32: bool = false;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, ptr: *const f16) -> I::f32s {
        // SAFETY: the caller's.
        unsafe { isa.load_f16(ptr) }
    }
    #[inline(always)]
    unsafe fn store<I: Isa>(isa: I, ptr: *mut f16, x: I::f32s) {
        // SAFETY: the caller's.
        unsafe { isa.store_f16(ptr, x) }
    }
    compiled_here!();
}

impl Element for bf16 {
    const NAME: &'static str = "bf16";
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self.to_f32_const()
    }
    #[inline(always)]
    fn from_f32(x: f32) -> bf16 {
        bf16::from_f32_const(x)
    }
}

impl Lanes for bf16 {
    const IS_F32: bool = false;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, ptr: *const bf16) -> I::f32s {
        // SAFETY: the caller's.
        unsafe { isa.load_bf16(ptr) }
    }
    #[inline(always)]
    unsafe fn store<I: Isa>(isa: I, ptr: *mut bf16, x: I::f32s) {
        // SAFETY: the caller's.
        unsafe { isa.store_bf16(ptr, x) }
    }
    compiled_here!();
}
