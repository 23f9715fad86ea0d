//! Memory for f32 on large pages, where the system has them: on small ones, above all in a virtual machine,
//! the bench would measure page faults and page tables more than the processor.

use std::ops::{Deref, DerefMut, Range};

use memmap2::MmapMut;

use crate::Failure;

/// f32 from the start of a page on, in whole pages of their own, all written once.
pub(crate) struct Buffer {
    map: MmapMut,
    /// The bytes of `map` that hold them.
    range: Range<usize>,
}

/// A large page of x86-64, and of ARM with small pages of 4 KiB.
const PAGE: usize = 2 << 20;

impl Buffer {
    /// `len` numbers, each from its index.
    pub fn new(len: usize, number: impl Fn(usize) -> f32) -> Result<Self, Failure> {
        let bytes = len * size_of::<f32>();
        let map = MmapMut::map_anon(bytes.next_multiple_of(PAGE) + PAGE) // one more, to begin with a page
            .map_err(|error| Failure::usage(format!("{bytes} bytes of memory: {error}")))?;
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage); // only a wish: small pages serve, too
        let start = map.as_ptr().align_offset(PAGE);
        let mut buffer = Self { map, range: start..start + bytes };
        buffer.iter_mut().enumerate().for_each(|(i, x)| *x = number(i));
        Ok(buffer)
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        bytemuck::cast_slice(&self.map[self.range.clone()])
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(&mut self.map[self.range.clone()])
    }
}
