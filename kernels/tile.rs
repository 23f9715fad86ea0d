//! The register tile, the one inner loop of everything:
//!
//! ```text
//! acc[m][n] = sum over t of a(m, t) * b[t][n]      a: scalars in the caller's memory, b: vectors in scratch
//! ```
//!
//! Scores: `a` is K (m = key, t = feature), `b` the packed queries. Values: `a` is V (m = feature, t = key),
//! `b` the weights. Every scalar is read once and broadcast into `NQ` multiply-adds, every vector into `M`;
//! with `NQ * M` independent sums the multiply-add units never wait, and `a` may have any strides at no cost.
//!
//! What becomes of a step of it, 4 vectors by 6 rows: on AVX-512 24 multiply-adds, 4 loads, 6 broadcasts, 3
//! others; on NEON 24 multiply-adds with 8 loads and 4 others for the scores, with 6 loads and 4 others for
//! the values, whose scalars lie side by side and are taken by lane. No spills. A core with four 128-bit
//! units and three loads a cycle needs 6 cycles for the multiply-adds, 4 for the loads: it can reach its peak.

use crate::isa::Isa;

/// Steps of a tile after which to ask for more.
const STEPS: usize = 16;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Some rows to ask for, wherever they lie.
#[derive(Clone, Copy)]
pub(crate) struct Lines {
    pub ptr: *const u8,
    /// Bytes from row to row, and in a row.
    pub row: isize,
    pub bytes: usize,
    pub count: usize,
}

impl Lines {
    pub const NONE: Self = Self { ptr: core::ptr::null(), row: 0, bytes: 0, count: 0 };

    #[inline(always)]
    fn lines(&self) -> usize {
        self.count * self.bytes.div_ceil(LINE)
    }
}

/// Asks for rows, for the second-level cache, while a product runs: some lines every `STEPS` steps. All at
/// once they would fill the buffers that the product's own loads wait in.
pub(crate) struct Feed {
    row: *const u8,
    byte: usize,
    now: Lines,
    then: Lines,
    left: usize,
    pace: usize,
}

impl Feed {
    /// What a product over `count` rows with `features` each, cut in tiles of `tall`, is to ask for.
    #[inline(always)]
    pub fn new([now, then]: [Lines; 2], count: usize, features: usize, tall: usize) -> Self {
        let left = now.lines() + then.lines();
        let pace = left.div_ceil((count.div_ceil(tall) * features.div_ceil(STEPS)).max(1));
        Self { row: now.ptr, byte: 0, now, then, left, pace }
    }

    /// Asks for all of them at once: products in tiles are not held up by it.
    #[inline(always)]
    pub fn all<I: Isa>(&mut self, isa: I) {
        self.pace = self.left;
        self.step(isa);
    }

    #[inline(always)]
    fn step<I: Isa>(&mut self, isa: I) {
        for _ in 0..self.pace.min(self.left) {
            if self.now.count == 0 {
                (self.now, self.then) = (self.then, Lines::NONE);
                (self.row, self.byte) = (self.now.ptr, 0);
            }
            isa.prefetch(self.row.wrapping_add(self.byte));
            self.byte += LINE;
            if self.byte >= self.now.bytes {
                (self.byte, self.row) = (0, self.row.wrapping_offset(self.now.row));
                self.now.count -= 1;
            }
            self.left -= 1;
        }
    }
}

/// One tile: `M` rows of `a` times `NQ` vectors, `steps` long. With `DOTS` a scalar is a pair of bf16, and so is
/// each lane of `b`.
///
/// # Safety
/// `a + m * a_row + t * a_step` must be readable for `m < M`, `t < steps`, and `steps * NQ` vectors at `b`; for
/// `DOTS` the processor must have them.
#[inline(always)]
pub(crate) unsafe fn product<I: Isa, const NQ: usize, const M: usize, const DOTS: bool>(
    isa: I,
    steps: usize,
    a: *const f32,
    [a_row, a_step]: [isize; 2],
    b: *const I::f32s,
    feed: &mut Feed,
) -> [[I::f32s; NQ]; M] {
    let mut acc = [[isa.splat_f32s(0.0); NQ]; M];
    let (mut a, mut b) = (a, b);
    let mut left = steps;
    while left > 0 {
        feed.step(isa);
        for _ in 0..left.min(STEPS) {
            // SAFETY: the caller's; both pointers are inside their ranges for every step.
            let vectors = unsafe { *b.cast::<[I::f32s; NQ]>() };
            for (m, acc) in acc.iter_mut().enumerate() {
                let scalar = a.wrapping_offset(m as isize * a_row);
                // SAFETY: the caller's. Pairs lie as bf16 do, at every second byte.
                unsafe {
                    let scalar = isa.splat_f32s(if DOTS { scalar.read_unaligned() } else { *scalar });
                    for n in 0..NQ {
                        acc[n] = if DOTS {
                            isa.dot(acc[n], scalar, vectors[n])
                        } else {
                            isa.mul_add_e_f32s(scalar, vectors[n], acc[n])
                        };
                    }
                }
            }
            a = a.wrapping_offset(a_step);
            b = b.wrapping_add(NQ);
        }
        left = left.saturating_sub(STEPS);
    }
    acc
}

/// A loop body over `M` rows from `start` on.
pub(crate) trait Tile {
    fn tile<const M: usize>(&mut self, start: usize);
}

/// Covers `0..n` with tiles of `MR` rows and a tail of halved ones.
#[inline(always)]
pub(crate) fn cover<const MR: usize>(n: usize, body: &mut impl Tile) {
    let mut start = 0;
    while start + MR <= n {
        body.tile::<MR>(start);
        start += MR;
    }
    if MR > 8 && start + 8 <= n {
        body.tile::<8>(start);
        start += 8;
    }
    if MR > 4 && start + 4 <= n {
        body.tile::<4>(start);
        start += 4;
    }
    if MR > 2 && start + 2 <= n {
        body.tile::<2>(start);
        start += 2;
    }
    if MR > 1 && start < n {
        body.tile::<1>(start);
    }
}
