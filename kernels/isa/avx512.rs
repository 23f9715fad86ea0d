//! AVX-512: 16 lanes.

use core::arch::asm;
use core::arch::x86_64::*;

use half::{bf16, f16};
use pulp::x86::V4;
use pulp::{cast, f32x16, u32x16};

use super::Isa;
use crate::exp::UNDERFLOW_4;

impl Isa for V4 {
    type Square = [f32x16; 16];

    #[inline(always)]
    fn square(self) -> Self::Square {
        [self.splat_f32x16(0.0); 16]
    }

    /// 64 shuffles: pairs of rows, pairs of pairs inside each quarter, then the quarters twice.
    #[inline(always)]
    fn transpose(self, square: Self::Square) -> Self::Square {
        let mut r: [__m512; 16] = cast(square);
        // SAFETY: `self` proves AVX-512 F.
        unsafe {
            // r[4g + c] holds, in quarter s, element 4s + c of rows 4g .. 4g + 4.
            for g in 0..4 {
                let [a, b, c, d] = [r[4 * g], r[4 * g + 1], r[4 * g + 2], r[4 * g + 3]];
                let (ab_low, ab_high) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
                let (cd_low, cd_high) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
                r[4 * g] = _mm512_shuffle_ps::<0x44>(ab_low, cd_low);
                r[4 * g + 1] = _mm512_shuffle_ps::<0xee>(ab_low, cd_low);
                r[4 * g + 2] = _mm512_shuffle_ps::<0x44>(ab_high, cd_high);
                r[4 * g + 3] = _mm512_shuffle_ps::<0xee>(ab_high, cd_high);
            }
            let mut out = square;
            for c in 0..4 {
                let [a, b] = [r[c], r[4 + c]];
                let [x, y] = [r[8 + c], r[12 + c]];
                let (ab_even, ab_odd) =
                    (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
                let (xy_even, xy_odd) =
                    (_mm512_shuffle_f32x4::<0x88>(x, y), _mm512_shuffle_f32x4::<0xdd>(x, y));
                out[c] = cast(_mm512_shuffle_f32x4::<0x88>(ab_even, xy_even));
                out[4 + c] = cast(_mm512_shuffle_f32x4::<0x88>(ab_odd, xy_odd));
                out[8 + c] = cast(_mm512_shuffle_f32x4::<0xdd>(ab_even, xy_even));
                out[12 + c] = cast(_mm512_shuffle_f32x4::<0xdd>(ab_odd, xy_odd));
            }
            out
        }
    }

    /// "Not less than" as one comparison: the general form costs a mask operation on the port of the sums.
    #[inline(always)]
    fn zero_below(self, x: f32x16, low: f32, y: f32x16) -> f32x16 {
        // SAFETY: `self` proves AVX-512 F.
        unsafe {
            let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(cast(x), _mm512_set1_ps(low));
            cast(_mm512_maskz_mov_ps(keep, cast(y)))
        }
    }

    /// In one instruction, and not on the port of the shuffles.
    #[inline(always)]
    fn hide_like(self, x: f32x16, bias: f32x16) -> f32x16 {
        // A nibble for each class of the second number, that of -inf the 4th: 4 is -inf, 0 the first number.
        const TABLE: i32 = 4 << (4 * 4);
        // SAFETY: `self` proves AVX-512 F.
        unsafe { cast(_mm512_fixupimm_ps::<0>(cast(x), cast(bias), _mm512_set1_epi32(TABLE))) }
    }

    /// `x = floor(2x) / 2 + r`, `4^r` by a polynomial of degree 5 on `0 <= r <= 1/2`, times `2^floor(2x)`: what
    /// is behind the point and before it in an instruction each. Where `x` is above -1/4 `r` is rounded, down;
    /// the factors were searched for the least error with that: 1.94 ulp.
    #[inline(always)]
    fn power_of_4(self, x: f32x16) -> f32x16 {
        const HALVES_DOWN: i32 = 1 << 4 | _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
        const C: [f32; 5] = [1.386_307, 0.960_568_3, 0.446_959_44, 0.142_911_1, 0.060_880_06];
        let x: __m512 = cast(x);
        // SAFETY: `self` proves AVX-512 F and DQ.
        unsafe {
            let r = _mm512_reduce_ps::<HALVES_DOWN>(x);
            let mut p = _mm512_set1_ps(C[4]);
            p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(C[3]));
            p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(C[2]));
            p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(C[1]));
            p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(C[0]));
            p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0));
            let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(UNDERFLOW_4));
            cast(_mm512_maskz_scalef_ps(keep, p, _mm512_add_ps(x, x)))
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
    unsafe fn load_f16(self, ptr: *const f16) -> f32x16 {
        // SAFETY: `self` proves AVX-512 F; the caller's.
        unsafe { cast(_mm512_cvtph_ps(_mm256_loadu_si256(ptr.cast()))) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, ptr: *mut f16, x: f32x16) {
        // SAFETY: `self` proves AVX-512 F; the caller's.
        unsafe {
            let narrow = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(cast(x));
            _mm256_storeu_si256(ptr.cast(), narrow);
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, ptr: *const bf16) -> f32x16 {
        // SAFETY: `self` proves AVX-512 F; the caller's.
        unsafe { cast(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(ptr.cast())))) }
    }

    const EVEN_FIRST: bool = true;

    #[inline(always)]
    unsafe fn load_two_bf16(self, ptr: *const bf16) -> [f32x16; 2] {
        // SAFETY: `self` proves AVX-512 F; the caller's.
        unsafe {
            let both = _mm512_loadu_si512(ptr.cast());
            let odd = _mm512_and_si512(both, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            [cast(_mm512_slli_epi32::<16>(both)), cast(odd)]
        }
    }

    const DOTS: bool = true;

    #[inline(always)]
    unsafe fn dot(self, acc: f32x16, a: f32x16, b: f32x16) -> f32x16 {
        // SAFETY: `self` proves AVX-512 F; the caller's.
        unsafe { cast(dot(cast(acc), cast(a), cast(b))) }
    }

    #[inline(always)]
    unsafe fn load_i8(self, ptr: *const i8) -> f32x16 {
        // SAFETY: `self` proves AVX-512 F; the caller's.
        unsafe { cast(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(ptr.cast())))) }
    }

    #[inline(always)]
    unsafe fn store_high(self, ptr: *mut bf16, x: u32x16) {
        // SAFETY: `self` proves AVX-512 F; the caller's.
        unsafe {
            let high = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(cast(x)));
            _mm256_storeu_si256(ptr.cast(), high);
        }
    }

    #[inline(always)]
    unsafe fn bits(self, ptr: *const bool, n: usize) -> u64 {
        // SAFETY: `self` proves AVX-512 BW; the caller's: a masked load touches its first `n` bytes only.
        unsafe {
            let bytes = _mm512_maskz_loadu_epi8(u64::MAX >> (64 - n.clamp(1, 64)), ptr.cast());
            _mm512_test_epi8_mask(bytes, bytes)
        }
    }

    #[inline(always)]
    fn hide(self, x: f32x16, bits: u64) -> f32x16 {
        // SAFETY: `self` proves AVX-512 F.
        unsafe { cast(_mm512_mask_mov_ps(_mm512_set1_ps(f32::NEG_INFINITY), bits as __mmask16, cast(x))) }
    }

    /// Four quarters at once, which are added last.
    #[inline(always)]
    fn sums(self, x: [f32x16; 4]) -> [f32; 4] {
        let [a, b, c, d]: [__m512; 4] = cast(x);
        // SAFETY: `self` proves AVX-512 F and DQ.
        unsafe {
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let sums = _mm512_add_ps(_mm512_shuffle_ps::<0x44>(ab, cd), _mm512_shuffle_ps::<0xee>(ab, cd));
            let half = _mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps::<1>(sums));
            cast(_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half)))
        }
    }
}

/// [`Isa::dot`] of AVX-512: asm, as the features of the token do not include it.
///
/// # Safety
/// The processor must have AVX-512 F and BF16.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn dot(mut acc: __m512, a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller's.
    unsafe {
        asm!("vdpbf16ps {acc}, {b}, {a}", acc = inout(zmm_reg) acc, a = in(zmm_reg) a, b = in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    acc
}
