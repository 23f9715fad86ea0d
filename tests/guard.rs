//! No kernel touches memory beside the caller's: every tensor ends, and then starts, at a page that traps.
//!
//! An out-of-bounds read of a vector kernel mostly hits other live memory and shows in no result. Here q, k,
//! v, mask, bias, out and lse each lie against a page without access (`mmap` and `mprotect`: hence `unsafe`
//! and `libc`, in this file alone), so a single byte too far ends the process with SIGSEGV. Which case it
//! was, the last line of a run with `--nocapture` tells. Results are the same to the bit as on ordinary
//! memory.
#![cfg(target_os = "linux")]

use std::ptr::null_mut;

use headwise::{Attention, Level, Position, Terms, View, ViewMut};

/// On which side of a buffer the trap lies.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Trap {
    Behind,
    Before,
}

/// Memory against a page without access.
struct Guarded<T> {
    map: *mut libc::c_void,
    bytes: usize,
    ptr: *mut T,
    len: usize,
}

impl<T: Copy> Guarded<T> {
    fn new(data: &[T], trap: Trap) -> Self {
        // SAFETY: asks for a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let inner = size_of_val(data).next_multiple_of(page);
        let bytes = inner + 2 * page;
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory at an address of the system's choice.
        let map = unsafe { libc::mmap(null_mut(), bytes, access, flags, -1, 0) };
        assert_ne!(map, libc::MAP_FAILED);
        let start = match trap {
            Trap::Before => page,
            Trap::Behind => page + inner - size_of_val(data), // aligned: a page is a multiple of any element
        };
        for at in [0, page + inner] {
            // SAFETY: the first and the last page of the map; nothing refers to them.
            assert_eq!(unsafe { libc::mprotect(map.byte_add(at), page, libc::PROT_NONE) }, 0);
        }
        // SAFETY: `start` and the data behind it lie between the two pages.
        let ptr = unsafe { map.byte_add(start) }.cast::<T>();
        // SAFETY: as above, and the map is new.
        unsafe { ptr.copy_from_nonoverlapping(data.as_ptr(), data.len()) };
        Self { map, bytes, ptr, len: data.len() }
    }

    fn get(&self) -> &[T] {
        // SAFETY: `new` has written `len` elements; they live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }

    fn get_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `get`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

impl<T> Drop for Guarded<T> {
    fn drop(&mut self) {
        // SAFETY: the whole map, which nothing refers to any more.
        unsafe { libc::munmap(self.map, self.bytes) };
    }
}

/// One problem: sizes, and which options it has.
#[derive(Debug, Clone, Copy)]
struct Case {
    b: usize,
    hk: usize,
    group: usize,
    lq: usize,
    lk: usize,
    d: usize,
    dv: usize,
    tokens_first: bool,
    causal: bool,
    mask: bool,
    bias: bool,
    /// Mask and bias are the same for all heads and batch entries.
    shared: bool,
}

/// Slices of a problem, in ordinary memory or guarded.
struct Slices<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    mask: &'a [bool],
    bias: &'a [f32],
}

impl Case {
    /// The `i`-th case of some sizes: options and heads take turns.
    fn new(i: usize, [lq, lk, d, dv]: [usize; 4]) -> Self {
        let bit = |n: u32| i >> n & 1 == 1;
        let (b, hk, group) = [(1, 1, 1), (2, 1, 1), (1, 1, 3), (1, 2, 2), (1, 1, 2)][i % 5];
        let (tokens_first, causal, mask, bias, shared) =
            (bit(0), bit(1), bit(2), bit(3), i.is_multiple_of(3));
        Self { b, hk, group, lq, lk, d, dv, tokens_first, causal, mask, bias, shared }
    }

    fn scores(&self) -> [usize; 4] {
        let Self { b, hk, group, lq, lk, shared, .. } = *self;
        if shared { [1, 1, lq, lk] } else { [b, hk * group, lq, lk] }
    }

    fn run(&self, level: Level, from: Slices<'_>, out: &mut [f32], lse: &mut [f32]) {
        let Self { b, hk, group, lq, lk, d, dv, .. } = *self;
        let hq = hk * group;
        let view = |data, [b, h, l, d]: [usize; 4]| match self.tokens_first {
            true => View::blhd(data, [b, l, h, d]),
            false => View::bhld(data, [b, h, l, d]),
        };
        let to = match self.tokens_first {
            true => ViewMut::blhd(out, [b, lq, hq, dv]),
            false => ViewMut::bhld(out, [b, hq, lq, dv]),
        };
        let q = view(from.q, [b, hq, lq, d]).unwrap();
        let (k, v) = (view(from.k, [b, hk, lk, d]).unwrap(), view(from.v, [b, hk, lk, dv]).unwrap());
        let terms = Terms {
            causal: self.causal,
            position: Position::BottomRight,
            mask: self.mask.then(|| View::bhld(from.mask, self.scores()).unwrap()),
            bias: self.bias.then(|| View::bhld(from.bias, self.scores()).unwrap()),
            ..Terms::default()
        };
        Attention::with_terms(terms).level(level).run_with_lse(q, k, v, to.unwrap(), lse).unwrap();
    }

    /// Ordinary memory against guarded memory, at every level.
    fn check(&self, levels: &[Level]) {
        println!("{self:?}"); // seen after a crash, with --nocapture
        let Self { b, hk, group, lq, lk, d, dv, .. } = *self;
        let hq = hk * group;
        let mut state = 1u32;
        let mut random = |n: usize| -> Vec<f32> {
            let next = |_| {
                state = state.wrapping_mul(1664525).wrapping_add(1013904223);
                (state >> 8) as f32 / (1 << 23) as f32 - 1.0
            };
            (0..n).map(next).collect()
        };
        let (q, k, v) = (random(b * hq * lq * d), random(b * hk * lk * d), random(b * hk * lk * dv));
        let bias = random(self.scores().iter().product());
        let mask: Vec<bool> = bias.iter().map(|x| x.abs() > 0.2).collect();
        for trap in [Trap::Behind, Trap::Before] {
            let [gq, gk, gv, gbias] = [&q, &k, &v, &bias].map(|x| Guarded::new(x, trap));
            let gmask = Guarded::new(&mask, trap);
            for &level in levels {
                let (mut out, mut lse) = (vec![f32::NAN; b * hq * lq * dv], vec![f32::NAN; b * hq * lq]);
                let (mut gout, mut glse) = (Guarded::new(&out, trap), Guarded::new(&lse, trap));
                let ordinary = Slices { q: &q, k: &k, v: &v, mask: &mask, bias: &bias };
                self.run(level, ordinary, &mut out, &mut lse);
                let (q, k, v) = (gq.get(), gk.get(), gv.get());
                let guarded = Slices { q, k, v, mask: gmask.get(), bias: gbias.get() };
                self.run(level, guarded, gout.get_mut(), glse.get_mut());
                let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same(&out, gout.get()) && same(&lse, glse.get()), "{level} {trap:?}: {self:?}");
                assert!(out.iter().all(|x| x.is_finite()), "{level}: {self:?}");
            }
        }
    }
}

/// On both sides of vectors of 4, 8 and 16, of tiles of 32 rows and of blocks of 128 keys.
const SIZES: [usize; 15] = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 40, 65, 129];

/// Every pair of lengths with some pair of features, and the other way round.
#[test]
fn nothing_beside_the_callers_memory_is_touched() {
    let levels: Vec<Level> = Level::available().collect();
    for i in 0..SIZES.len() * SIZES.len() {
        let (x, y) = (SIZES[i % SIZES.len()], SIZES[i / SIZES.len()]);
        let (z, w) = (SIZES[i * 7 % 12], SIZES[i * 5 % 13]); // up to 33 and 40
        Case::new(i, [x, y, z, w]).check(&levels);
        Case::new(i * 11 + 5, [z, w, x, y]).check(&levels);
    }
}

/// The trap does spring: one byte behind, and one before, ends a process.
#[test]
fn the_guard_traps() {
    for (trap, offset) in [(Trap::Behind, 3), (Trap::Before, -1)] {
        let guarded = Guarded::new(&[1u8, 2, 3], trap);
        let address = guarded.ptr.wrapping_offset(offset);
        // SAFETY: the child does nothing but read one byte, which is meant to kill it, and exit.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                address.read_volatile();
                libc::_exit(0);
            }
            let mut status = 0;
            assert!(child > 0 && libc::waitpid(child, &mut status, 0) == child);
            status
        };
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "{trap:?}: {status}");
        assert_eq!(guarded.get(), [1, 2, 3]);
    }
}
