//! A view whose element type is known at run time only: what the kernels compute with, so that they are
//! compiled once for all types.

use core::ops::Deref;

use crate::element::Stored;
use crate::{DType, View};

/// A view whose strides count bytes; its sizes count elements, as ever.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tensor<'a> {
    bytes: View<'a, u8>,
    pub dtype: DType,
}

impl<'a> Tensor<'a> {
    pub fn new<C: Stored>(view: View<'a, C>) -> Self {
        Self { bytes: view.bytes(), dtype: C::DTYPE }
    }

    /// Whether the features of a row lie side by side.
    #[inline(always)]
    pub fn is_dense(&self) -> bool {
        self.strides()[3] == self.dtype.size() as isize
    }
}

impl<'a> Deref for Tensor<'a> {
    type Target = View<'a, u8>;

    fn deref(&self) -> &View<'a, u8> {
        &self.bytes
    }
}
