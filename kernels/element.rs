//! Element types of Q, K, V and the output. A type is how it is loaded and stored; the arithmetic is f32.

use core::fmt;

use half::{bf16, f16};

use crate::isa::Isa;

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
    impl Sealed for i8 {}
}

/// The element types, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// `f32`.
    F32,
    /// IEEE half precision: 10 bits behind the leading one, up to 65504.
    F16,
    /// The upper half of an `f32`: 7 bits behind the leading one.
    Bf16,
    /// Integers, each to be multiplied by its group's scale: [`crate::View::scaled`].
    I8,
}

impl DType {
    /// `f32`, `f16`, `bf16` or `i8`: the name in tables and file formats.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::I8 => "i8",
        }
    }

    /// Bytes of an element.
    #[inline(always)]
    pub fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::Bf16 => 2,
            DType::I8 => 1,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A type that K and V can have: `f32`, `half`'s `f16` and `bf16`, and `i8` with scales.
#[allow(private_bounds)]
pub trait Stored: Copy + Default + Send + Sync + fmt::Debug + sealed::Sealed + Load + 'static {
    /// The type by name.
    const DTYPE: DType;
    /// The exact value, of an `i8` without its scale.
    fn to_f32(self) -> f32;
    /// The nearest value, ties to even, of an `i8` from -127 to 127. NaN stays NaN, and becomes 0 as an `i8`.
    fn from_f32(x: f32) -> Self;
}

/// A type that Q, K, V and the output can have: `f32`, and `half`'s `f16` and `bf16`.
#[allow(private_bounds)]
pub trait Element: Stored + Store {}

pub(crate) trait Load: Sized {
    /// Loads a vector.
    ///
    /// # Safety
    /// `ptr` must be valid for reading `I::F32_LANES` elements.
    unsafe fn load<I: Isa>(isa: I, ptr: *const Self) -> I::f32s;

    /// Whether [`Load::load_two`] gives the elements at even places first, and those at odd ones second.
    #[inline(always)]
    fn even_first<I: Isa>() -> bool {
        false
    }

    /// Loads two vectors.
    ///
    /// # Safety
    /// `ptr` must be valid for reading `2 * I::F32_LANES` elements.
    #[inline(always)]
    unsafe fn load_two<I: Isa>(isa: I, ptr: *const Self) -> [I::f32s; 2] {
        // SAFETY: the caller's.
        unsafe { [Self::load(isa, ptr), Self::load(isa, ptr.add(I::F32_LANES))] }
    }
}

pub(crate) trait Store: Sized {
    /// Stores a vector.
    ///
    /// # Safety
    /// `ptr` must be valid for writing `I::F32_LANES` elements.
    unsafe fn store<I: Isa>(isa: I, ptr: *mut Self, x: I::f32s);
}

impl Stored for f32 {
    const DTYPE: DType = DType::F32;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }
}

impl Element for f32 {}

impl Load for f32 {
    #[inline(always)]
    unsafe fn load<I: Isa>(_: I, ptr: *const f32) -> I::f32s {
        // SAFETY: the caller's; vectors are plain old data.
        unsafe { ptr.cast::<I::f32s>().read_unaligned() }
    }
}

impl Store for f32 {
    #[inline(always)]
    unsafe fn store<I: Isa>(_: I, ptr: *mut f32, x: I::f32s) {
        // SAFETY: the caller's.
        unsafe { ptr.cast::<I::f32s>().write_unaligned(x) }
    }
}

impl Stored for f16 {
    const DTYPE: DType = DType::F16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self.to_f32_const()
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f16 {
        f16::from_f32_const(x)
    }
}

impl Element for f16 {}

impl Load for f16 {
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, ptr: *const f16) -> I::f32s {
        // SAFETY: the caller's.
        unsafe { isa.load_f16(ptr) }
    }
}

impl Store for f16 {
    #[inline(always)]
    unsafe fn store<I: Isa>(isa: I, ptr: *mut f16, x: I::f32s) {
        // SAFETY: the caller's.
        unsafe { isa.store_f16(ptr, x) }
    }
}

impl Stored for bf16 {
    const DTYPE: DType = DType::Bf16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self.to_f32_const()
    }
    #[inline(always)]
    fn from_f32(x: f32) -> bf16 {
        bf16::from_f32_const(x)
    }
}

impl Element for bf16 {}

impl Load for bf16 {
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, ptr: *const bf16) -> I::f32s {
        // SAFETY: the caller's.
        unsafe { isa.load_bf16(ptr) }
    }

    #[inline(always)]
    fn even_first<I: Isa>() -> bool {
        I::EVEN_FIRST
    }

    #[inline(always)]
    unsafe fn load_two<I: Isa>(isa: I, ptr: *const bf16) -> [I::f32s; 2] {
        // SAFETY: the caller's.
        unsafe { isa.load_two_bf16(ptr) }
    }
}

impl Store for bf16 {
    #[inline(always)]
    unsafe fn store<I: Isa>(isa: I, ptr: *mut bf16, x: I::f32s) {
        // SAFETY: the caller's.
        unsafe { isa.store_bf16(ptr, x) }
    }
}

impl Stored for i8 {
    const DTYPE: DType = DType::I8;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from(self)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> i8 {
        x.round_ties_even().clamp(-127.0, 127.0) as i8
    }
}

impl Load for i8 {
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, ptr: *const i8) -> I::f32s {
        // SAFETY: the caller's.
        unsafe { isa.load_i8(ptr) }
    }
}
