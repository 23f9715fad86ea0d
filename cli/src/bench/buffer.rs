//! Memory for numbers on large pages, where the system has them: on small ones, above all in a virtual
//! machine, the bench would measure page faults and page tables more than the processor.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};

use bytemuck::Pod;
use memmap2::MmapMut;

use crate::Failure;

/// Numbers from the start of a page on, in whole pages of their own, all written once.
pub(crate) struct Buffer<T = f32> {
    map: MmapMut,
    /// The bytes of `map` that hold them.
    range: Range<usize>,
    _numbers: PhantomData<T>,
}

/// A large page of x86-64, and of ARM with small pages of 4 KiB.
const PAGE: usize = 2 << 20;

impl<T: Pod> Buffer<T> {
    /// `len` numbers, each from its index.
    pub fn new(len: usize, number: impl Fn(usize) -> T) -> Result<Self, Failure> {
        let bytes = len * size_of::<T>();
        let map = MmapMut::map_anon(bytes.next_multiple_of(PAGE) + PAGE) // one more, to begin with a page
            .map_err(|error| Failure::usage(format!("{bytes} bytes of memory: {error}")))?;
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage); // only a wish: small pages serve, too
        let start = map.as_ptr().align_offset(PAGE);
        let mut buffer = Self { map, range: start..start + bytes, _numbers: PhantomData };
        buffer.iter_mut().enumerate().for_each(|(i, x)| *x = number(i));
        Ok(buffer)
    }
}

impl<T: Pod> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(&self.map[self.range.clone()])
    }
}

impl<T: Pod> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.map[self.range.clone()])
    }
}
