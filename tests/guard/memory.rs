//! Memory against a page without access (`mmap` and `mprotect`: hence `unsafe` and `libc`, in this file alone).

use std::ops::{Deref, DerefMut};
use std::ptr::null_mut;

/// On which side of a buffer the trap lies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Trap {
    /// On neither: ordinary memory.
    Nowhere,
    Behind,
    Before,
}

/// A slice with its trap.
pub struct Guarded<T> {
    map: *mut libc::c_void,
    bytes: usize,
    ptr: *mut T,
    len: usize,
}

impl<T: Copy> Guarded<T> {
    pub fn new(data: &[T], trap: Trap) -> Self {
        // SAFETY: asks for a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let inner = size_of_val(data).next_multiple_of(page);
        let bytes = inner + 2 * page;
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory at an address of the system's choice.
        let map = unsafe { libc::mmap(null_mut(), bytes, access, flags, -1, 0) };
        assert_ne!(map, libc::MAP_FAILED);
        let start = match trap {
            Trap::Nowhere | Trap::Before => page,
            Trap::Behind => page + inner - size_of_val(data), // aligned: a page is a multiple of any element
        };
        for at in if trap == Trap::Nowhere { vec![] } else { vec![0, page + inner] } {
            // SAFETY: the first and the last page of the map; nothing refers to them.
            assert_eq!(unsafe { libc::mprotect(map.byte_add(at), page, libc::PROT_NONE) }, 0);
        }
        // SAFETY: `start` and the data behind it lie between the two pages.
        let ptr = unsafe { map.byte_add(start) }.cast::<T>();
        // SAFETY: as above, and the map is new.
        unsafe { ptr.copy_from_nonoverlapping(data.as_ptr(), data.len()) };
        Self { map, bytes, ptr, len: data.len() }
    }
}

impl<T> Deref for Guarded<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `new` has written `len` elements; they live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

impl<T> DerefMut for Guarded<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

impl<T> Drop for Guarded<T> {
    fn drop(&mut self) {
        // SAFETY: the whole map, which nothing refers to any more.
        unsafe { libc::munmap(self.map, self.bytes) };
    }
}

/// The trap does spring: one byte behind, and one before, ends a process.
#[test]
fn the_guard_traps() {
    for (trap, offset) in [(Trap::Behind, 3), (Trap::Before, -1)] {
        let guarded = Guarded::new(&[1u8, 2, 3], trap);
        let address = guarded.ptr.wrapping_offset(offset);
        // SAFETY: the child does nothing but read one byte, which is meant to kill it, and exit. A sanitizer's
        // handler would report it and exit otherwise, so the signal has its default action.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::signal(libc::SIGSEGV, libc::SIG_DFL);
                address.read_volatile();
                libc::_exit(0);
            }
            let mut status = 0;
            assert!(child > 0 && libc::waitpid(child, &mut status, 0) == child);
            status
        };
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "{trap:?}: {status}");
        assert_eq!(guarded[..], [1, 2, 3]);
    }
}
