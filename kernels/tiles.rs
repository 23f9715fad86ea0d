//! Products of bf16 in tiles (AMX: 16 rows of 64 bytes a register), 16 times the rate of multiply-adds:
//!
//! ```text
//! c[m][n] (+)= sum over t of a[m][t] * b[t][n]     a: rows of bf16;  b: pairs (b[2p][n], b[2p + 1][n]);  c: f32
//! ```
//!
//! Scores: `a` is K as it lies, `b` the packed queries, `c` the transposed scores. Values: `a` is V
//! transposed, `b` the weights, rounded to bf16, `c` the transposed output. What a column comes to depends on
//! that column and on the places of the terms modulo 32 only, and terms of 0 change nothing.
//!
//! (Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter on AMX, for the blocking: two by
//! two tiles, so that each tile that is loaded is used twice.)

/// Rows and columns of a tile, and terms of a step.
pub(crate) const SIDE: usize = 16;
pub(crate) const STEP: usize = 32;

/// A product; pointers are to bytes, and so are the distances of rows.
#[derive(Clone, Copy)]
#[cfg_attr(
    not(all(target_arch = "x86_64", target_os = "linux")),
    allow(dead_code, reason = "read where there are tiles")
)]
pub(crate) struct Product {
    pub a: *const u8,
    pub a_row: usize,
    pub b: *const u8,
    pub b_row: usize,
    pub c: *mut u8,
    pub c_row: usize,
    /// In tiles.
    pub rows: usize,
    pub columns: usize,
    pub steps: usize,
    /// To what `c` holds, or in place of it.
    pub add: bool,
}

impl Product {
    /// Computes it.
    ///
    /// # Safety
    /// Between [`begin`] and [`end`], on a processor where they are [`available`]. Whole tiles must be
    /// readable and, of `c`, writable.
    pub unsafe fn run(self) {
        let (mut row, Self { a, a_row, b, c, c_row, .. }) = (0, self);
        while row < self.rows {
            let two_rows = row + 2 <= self.rows;
            let mut column = 0;
            while column < self.columns {
                let two_columns = column + 2 <= self.columns;
                let one = Self {
                    a: a.wrapping_add(row * SIDE * a_row),
                    b: b.wrapping_add(column * SIDE * size_of::<f32>()),
                    c: c.wrapping_add(row * SIDE * c_row + column * SIDE * size_of::<f32>()),
                    ..self
                };
                // SAFETY: the caller's.
                unsafe {
                    match (two_rows, two_columns) {
                        (true, true) => one.block::<2, 2>(),
                        (true, false) => one.block::<2, 1>(),
                        (false, true) => one.block::<1, 2>(),
                        (false, false) => one.block::<1, 1>(),
                    }
                }
                column += 2;
            }
            row += 2;
        }
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx {
    use core::arch::asm;
    use core::arch::x86_64::{__cpuid, __cpuid_count};
    use std::sync::OnceLock;

    use super::{Product, SIDE, STEP};

    /// Whether the processor has them and the system lets this process use them.
    pub(crate) fn available() -> bool {
        static AVAILABLE: OnceLock<bool> = OnceLock::new();
        *AVAILABLE.get_or_init(|| {
            const BF16: u32 = 1 << 22;
            const TILES: u32 = 1 << 24;
            if __cpuid(0).eax < 7 || __cpuid_count(7, 0).edx & (BF16 | TILES) != BF16 | TILES {
                return false;
            }
            // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): the state is large, so Linux wants to be
            // asked.
            let status: isize;
            // SAFETY: the call takes two numbers and touches no memory.
            unsafe {
                asm!("syscall", inlateout("rax") 158isize => status, in("rdi") 0x1023, in("rsi") 18,
                    out("rcx") _, out("r11") _, options(nostack));
            }
            status == 0
        })
    }

    /// Palette 1, every tile 16 rows of 64 bytes.
    #[repr(C, align(64))]
    struct Config {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        bytes: [u16; 16],
        rows: [u8; 16],
    }

    static CONFIG: Config = {
        let (mut bytes, mut rows, mut tile) = ([0; 16], [0; 16], 0);
        while tile < 8 {
            (bytes[tile], rows[tile]) = (64, SIDE as u8);
            tile += 1;
        }
        Config { palette: 1, start_row: 0, reserved: [0; 14], bytes, rows }
    };

    /// Gives this thread its tiles.
    ///
    /// # Safety
    /// They must be [`available`].
    pub(crate) unsafe fn begin() {
        // SAFETY: the caller's; the compiler itself does not use tiles.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, preserves_flags)) };
    }

    /// Lets go of them, so that threads change places at no more cost than before.
    ///
    /// # Safety
    /// They must be [`available`].
    pub(crate) unsafe fn end() {
        // SAFETY: the caller's.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }

    impl Product {
        /// `R` by `C` tiles: `c` in tiles 0 to 3, `a` in 4 and 5, `b` in 6 and 7.
        ///
        /// # Safety
        /// As for [`Product::run`].
        pub(super) unsafe fn block<const R: usize, const C: usize>(self) {
            let Self { a_row, b_row, c_row, steps, .. } = self;
            let (a, b) = ([self.a, self.a.wrapping_add(SIDE * a_row)], [self.b, self.b.wrapping_add(64)]);
            let c = [self.c, self.c.wrapping_add(64)];
            let below = c.map(|c| c.wrapping_add(SIDE * c_row));
            // SAFETY: the caller's.
            unsafe {
                if self.add {
                    asm!("tileloadd tmm0, [{c} + {r}*1]", c = in(reg) c[0], r = in(reg) c_row);
                    if C == 2 {
                        asm!("tileloadd tmm1, [{c} + {r}*1]", c = in(reg) c[1], r = in(reg) c_row);
                    }
                    if R == 2 {
                        asm!("tileloadd tmm2, [{c} + {r}*1]", c = in(reg) below[0], r = in(reg) c_row);
                    }
                    if R == 2 && C == 2 {
                        asm!("tileloadd tmm3, [{c} + {r}*1]", c = in(reg) below[1], r = in(reg) c_row);
                    }
                } else {
                    asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3");
                }
                for step in 0..steps {
                    let a = a.map(|a| a.wrapping_add(step * STEP * 2));
                    let b = b.map(|b| b.wrapping_add(step * SIDE * b_row));
                    asm!("tileloadd tmm4, [{a} + {ar}*1]", "tileloadd tmm6, [{b} + {br}*1]",
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        a = in(reg) a[0], ar = in(reg) a_row, b = in(reg) b[0], br = in(reg) b_row);
                    if C == 2 {
                        asm!("tileloadd tmm7, [{b} + {br}*1]", "tdpbf16ps tmm1, tmm4, tmm7",
                            b = in(reg) b[1], br = in(reg) b_row);
                    }
                    if R == 2 {
                        asm!("tileloadd tmm5, [{a} + {ar}*1]", "tdpbf16ps tmm2, tmm5, tmm6",
                            a = in(reg) a[1], ar = in(reg) a_row);
                    }
                    if R == 2 && C == 2 {
                        asm!("tdpbf16ps tmm3, tmm5, tmm7");
                    }
                }
                asm!("tilestored [{c} + {r}*1], tmm0", c = in(reg) c[0], r = in(reg) c_row);
                if C == 2 {
                    asm!("tilestored [{c} + {r}*1], tmm1", c = in(reg) c[1], r = in(reg) c_row);
                }
                if R == 2 {
                    asm!("tilestored [{c} + {r}*1], tmm2", c = in(reg) below[0], r = in(reg) c_row);
                }
                if R == 2 && C == 2 {
                    asm!("tilestored [{c} + {r}*1], tmm3", c = in(reg) below[1], r = in(reg) c_row);
                }
            }
        }
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) use amx::{available, begin, end};

/// Elsewhere there are none.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
mod none {
    use super::Product;

    pub(crate) fn available() -> bool {
        false
    }

    pub(crate) unsafe fn begin() {}

    pub(crate) unsafe fn end() {}

    impl Product {
        pub(super) unsafe fn block<const R: usize, const C: usize>(self) {
            unreachable!("tiles are not available")
        }
    }
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub(crate) use none::{available, begin, end};
