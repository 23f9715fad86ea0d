//! AVX2: 8 lanes.

use core::arch::asm;
use core::arch::x86_64::*;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

use half::{bf16, f16};
use pulp::x86::V3;
use pulp::{cast, f32x8, u32x8};

use super::Isa;

impl Isa for V3 {
    type Square = [f32x8; 8];

    #[inline(always)]
    fn square(self) -> Self::Square {
        [self.splat_f32x8(0.0); 8]
    }

    /// 24 shuffles: pairs of rows, then pairs of pairs inside each half, then the halves.
    #[inline(always)]
    fn transpose(self, square: Self::Square) -> Self::Square {
        let r: [__m256; 8] = cast(square);
        // SAFETY: `self` proves AVX.
        unsafe {
            let t: [__m256; 8] = [
                _mm256_unpacklo_ps(r[0], r[1]),
                _mm256_unpackhi_ps(r[0], r[1]),
                _mm256_unpacklo_ps(r[2], r[3]),
                _mm256_unpackhi_ps(r[2], r[3]),
                _mm256_unpacklo_ps(r[4], r[5]),
                _mm256_unpackhi_ps(r[4], r[5]),
                _mm256_unpacklo_ps(r[6], r[7]),
                _mm256_unpackhi_ps(r[6], r[7]),
            ];
            let u: [__m256; 8] = [
                _mm256_shuffle_ps::<0x44>(t[0], t[2]),
                _mm256_shuffle_ps::<0xee>(t[0], t[2]),
                _mm256_shuffle_ps::<0x44>(t[1], t[3]),
                _mm256_shuffle_ps::<0xee>(t[1], t[3]),
                _mm256_shuffle_ps::<0x44>(t[4], t[6]),
                _mm256_shuffle_ps::<0xee>(t[4], t[6]),
                _mm256_shuffle_ps::<0x44>(t[5], t[7]),
                _mm256_shuffle_ps::<0xee>(t[5], t[7]),
            ];
            [
                cast(_mm256_permute2f128_ps::<0x20>(u[0], u[4])),
                cast(_mm256_permute2f128_ps::<0x20>(u[1], u[5])),
                cast(_mm256_permute2f128_ps::<0x20>(u[2], u[6])),
                cast(_mm256_permute2f128_ps::<0x20>(u[3], u[7])),
                cast(_mm256_permute2f128_ps::<0x31>(u[0], u[4])),
                cast(_mm256_permute2f128_ps::<0x31>(u[1], u[5])),
                cast(_mm256_permute2f128_ps::<0x31>(u[2], u[6])),
                cast(_mm256_permute2f128_ps::<0x31>(u[3], u[7])),
            ]
        }
    }

    #[inline(always)]
    fn prefetch_near(self, ptr: *const u8) {
        // SAFETY: a hint; it reads nothing and faults on no address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ptr.cast()) };
    }

    #[inline(always)]
    fn prefetch(self, ptr: *const u8) {
        // SAFETY: a hint; it reads nothing and faults on no address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(ptr.cast()) };
    }

    #[inline(always)]
    unsafe fn load_f16(self, ptr: *const f16) -> f32x8 {
        // SAFETY: `self` proves AVX; the caller's.
        unsafe { cast(if F16C.load(Relaxed) { widen(ptr) } else { widen_without(ptr) }) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, ptr: *mut f16, x: f32x8) {
        // SAFETY: `self` proves AVX; the caller's.
        unsafe { if F16C.load(Relaxed) { narrow(ptr, cast(x)) } else { narrow_without(ptr, x) } }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, ptr: *const bf16) -> f32x8 {
        // SAFETY: `self` proves AVX2; the caller's.
        unsafe { cast(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(ptr.cast())))) }
    }

    const EVEN_FIRST: bool = true;

    #[inline(always)]
    unsafe fn load_two_bf16(self, ptr: *const bf16) -> [f32x8; 2] {
        // SAFETY: `self` proves AVX2; the caller's.
        unsafe {
            let both = _mm256_loadu_si256(ptr.cast());
            let odd = _mm256_and_si256(both, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            [cast(_mm256_slli_epi32::<16>(both)), cast(odd)]
        }
    }

    #[inline(always)]
    unsafe fn load_i8(self, ptr: *const i8) -> f32x8 {
        // SAFETY: `self` proves AVX2; the caller's.
        unsafe { cast(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(ptr.cast())))) }
    }

    #[inline(always)]
    unsafe fn store_high(self, ptr: *mut bf16, x: u32x8) {
        // SAFETY: `self` proves AVX2; the caller's. Packing goes by halves: the quarters 0 and 2 are left.
        unsafe {
            let high = _mm256_srli_epi32::<16>(cast(x));
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(high, high));
            _mm_storeu_si128(ptr.cast(), _mm256_castsi256_si128(packed));
        }
    }

    #[inline(always)]
    unsafe fn bits(self, ptr: *const bool, n: usize) -> u64 {
        // SAFETY: `self` proves AVX2; the caller's, for both halves where there are 64.
        unsafe {
            if n < 64 {
                return (0..n).fold(0, |bits, j| bits | u64::from(*ptr.add(j)) << j);
            }
            let half = |ptr: *const bool| {
                let top_bits = _mm256_slli_epi16::<7>(_mm256_loadu_si256(ptr.cast()));
                u64::from(_mm256_movemask_epi8(top_bits) as u32)
            };
            half(ptr) | half(ptr.add(32)) << 32
        }
    }

    #[inline(always)]
    fn hide(self, x: f32x8, bits: u64) -> f32x8 {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let shown = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits as i32), lane), lane);
            let minus_inf = _mm256_set1_ps(f32::NEG_INFINITY);
            cast(_mm256_blendv_ps(minus_inf, cast(x), _mm256_castsi256_ps(shown)))
        }
    }

    #[inline(always)]
    fn sums(self, x: [f32x8; 4]) -> [f32; 4] {
        let [a, b, c, d]: [__m256; 4] = cast(x);
        // SAFETY: `self` proves AVX.
        unsafe {
            let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            let sums = _mm256_add_ps(_mm256_shuffle_ps::<0x44>(ab, cd), _mm256_shuffle_ps::<0xee>(ab, cd));
            cast(_mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums)))
        }
    }
}

/// What [`has_f16c`] has found. Looked at for each vector of f16: the test of the standard library, which may
/// have to find out first, would hold up the loops, and so would any call in them.
static F16C: AtomicBool = AtomicBool::new(false);

/// Whether the processor converts f16 (F16C): nearly all with AVX2 do. To be called before vectors of f16 are
/// loaded or stored, which go one by one or by detours until then.
pub(crate) fn has_f16c() -> bool {
    let found = std::is_x86_feature_detected!("f16c");
    F16C.store(found, Relaxed);
    found
}

/// Widens 8 f16 by F16C. The compiler would call, not inline, its own function for it: the features of the
/// token do not include F16C. To the compiler this one is AVX code.
///
/// # Safety
/// The processor must have AVX and F16C; `ptr` must be valid for reading 8 elements.
#[inline]
#[target_feature(enable = "avx")]
unsafe fn widen(ptr: *const f16) -> __m256 {
    let wide;
    // SAFETY: the caller's.
    unsafe {
        asm!("vcvtph2ps {y}, xmmword ptr [{x}]", x = in(reg) ptr, y = lateout(ymm_reg) wide,
            options(pure, readonly, nostack, preserves_flags));
    }
    wide
}

/// Narrows 8 f32 to the nearest f16 by F16C.
///
/// # Safety
/// The processor must have AVX and F16C; `ptr` must be valid for writing 8 elements.
#[inline]
#[target_feature(enable = "avx")]
unsafe fn narrow(ptr: *mut f16, x: __m256) {
    // SAFETY: the caller's.
    unsafe {
        asm!("vcvtps2ph xmmword ptr [{y}], {x}, 0", x = in(ymm_reg) x, y = in(reg) ptr,
            options(nostack, preserves_flags));
    }
}

/// [`widen`] without F16C: the exponent is moved by a multiplication, which makes subnormal numbers normal.
///
/// # Safety
/// The processor must have AVX2; `ptr` must be valid for reading 8 elements.
#[inline(always)]
unsafe fn widen_without(ptr: *const f16) -> __m256 {
    const INFINITY: i32 = 31 << 23; // f16's exponent, before it is moved
    // SAFETY: the caller's.
    unsafe {
        let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(ptr.cast()));
        let sign = _mm256_slli_epi32::<16>(_mm256_and_si256(bits, _mm256_set1_epi32(0x8000)));
        let size = _mm256_slli_epi32::<13>(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fff)));
        let moved = _mm256_mul_ps(_mm256_castsi256_ps(size), _mm256_set1_ps(2f32.powi(112)));
        let infinite = _mm256_cmpgt_epi32(size, _mm256_set1_epi32(INFINITY - 1));
        let infinite = _mm256_and_si256(infinite, _mm256_set1_epi32(0x7f80_0000));
        _mm256_or_ps(moved, _mm256_castsi256_ps(_mm256_or_si256(infinite, sign)))
    }
}

/// [`narrow`] without F16C.
///
/// # Safety
/// `ptr` must be valid for writing 8 elements.
#[cold]
#[inline(never)]
unsafe fn narrow_without(ptr: *mut f16, x: f32x8) {
    let x: [f32; 8] = cast(x);
    for (i, x) in x.into_iter().enumerate() {
        // SAFETY: the caller's.
        unsafe { *ptr.add(i) = f16::from_f32_const(x) };
    }
}
