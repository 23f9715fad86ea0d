//! AVX2 (8 lanes) and AVX-512 (16 lanes).

use core::arch::x86_64::*;

use pulp::x86::{V3, V4};
use pulp::{cast, f32x8, f32x16};

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
    fn prefetch_near(self, ptr: *const f32) {
        // SAFETY: a hint; it reads nothing and faults on no address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ptr.cast()) };
    }

    #[inline(always)]
    fn prefetch(self, ptr: *const f32) {
        // SAFETY: a hint; it reads nothing and faults on no address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(ptr.cast()) };
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

    #[inline(always)]
    fn prefetch_near(self, ptr: *const f32) {
        // SAFETY: a hint; it reads nothing and faults on no address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ptr.cast()) };
    }

    #[inline(always)]
    fn prefetch(self, ptr: *const f32) {
        // SAFETY: a hint; it reads nothing and faults on no address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(ptr.cast()) };
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
