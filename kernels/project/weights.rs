//! The weights of a projection, packed once so that no call has to.

use aligned_vec::{AVec, ConstAlign};
use half::{bf16, f16};

use crate::call::length;
use crate::element::{Element, Store};
use crate::isa::Isa;
use crate::view::count;
use crate::{DType, Error};

/// Outputs in a panel: four vectors of AVX-512, eight of AVX2.
pub(crate) const PANEL: usize = 64;

/// How a matrix of weights lies in memory, row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightLayout {
    /// `[out, in]`: `nn.Linear`, most model files.
    OutIn,
    /// `[in, out]`: GPT-2's `Conv1D`, Keras, mathematics (`Y = X W`).
    InOut,
}

/// A type that weights can be kept in: `f32`, `half::f16` or `half::bf16`.
#[allow(private_bounds)]
pub trait Weight: Element + Kept {}

impl<T: Element + Kept> Weight for T {}

/// Which of the kinds of panels a type makes.
pub(crate) trait Kept: Sized {
    fn panels(packed: Packed<Self>) -> Panels;
}

impl Kept for f32 {
    fn panels(packed: Packed<Self>) -> Panels {
        Panels::F32(packed)
    }
}

impl Kept for f16 {
    fn panels(packed: Packed<Self>) -> Panels {
        Panels::F16(packed)
    }
}

impl Kept for bf16 {
    fn panels(packed: Packed<Self>) -> Panels {
        Panels::Bf16(packed)
    }
}

type Packed<T> = AVec<T, ConstAlign<64>>;

#[derive(Debug, Clone)]
pub(crate) enum Panels {
    F32(Packed<f32>),
    F16(Packed<f16>),
    Bf16(Packed<bf16>),
}

/// A matrix of weights `[in, out]`, packed in panels `[out / 64][in][64]` (the last one filled up with
/// zeros): what 64 outputs need lies in one stream, in the order in which it is used. Weights in half
/// precision stay so, and are widened exactly when they are used.
#[derive(Debug, Clone)]
pub struct Weights {
    inputs: usize,
    outputs: usize,
    panels: Panels,
}

/// Some inputs of a panel.
pub(crate) enum Chunk<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

impl<'a> Chunk<'a> {
    /// What lies behind them in memory, and their bytes.
    #[inline(always)]
    pub fn behind(&self) -> (*const u8, usize) {
        match self {
            Chunk::F32(x) => (x.as_ptr_range().end.cast(), size_of_val(*x)),
            Chunk::F16(x) => (x.as_ptr_range().end.cast(), size_of_val(*x)),
            Chunk::Bf16(x) => (x.as_ptr_range().end.cast(), size_of_val(*x)),
        }
    }

    /// The weights as f32: where they are, or widened into `room`.
    #[inline(always)]
    pub fn widen<I: Isa>(self, isa: I, room: &'a mut [f32]) -> &'a [f32] {
        match self {
            Chunk::F32(x) => x,
            Chunk::F16(x) => widen(isa, x, room),
            Chunk::Bf16(x) => widen(isa, x, room),
        }
    }
}

/// [`Chunk::widen`] for half precision.
#[inline(always)]
fn widen<'r, I: Isa, T: Element>(isa: I, x: &[T], room: &'r mut [f32]) -> &'r [f32] {
    let room = &mut room[..x.len()];
    for (to, x) in room.chunks_exact_mut(I::F32_LANES).zip(x.chunks_exact(I::F32_LANES)) {
        // SAFETY: a vector of each. Chunks are whole panels, so nothing is left over.
        unsafe { f32::store(isa, to.as_mut_ptr(), T::load(isa, x.as_ptr())) };
    }
    room
}

impl Weights {
    /// Packs `data`, which has `inputs * outputs` elements in the given layout.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the sizes multiply beyond `isize`, [`Error::Length`] if `data` has another
    /// length.
    pub fn pack<T: Weight>(
        data: &[T],
        layout: WeightLayout,
        inputs: usize,
        outputs: usize,
    ) -> Result<Self, Error> {
        let shape = [1, 1, inputs, outputs.checked_next_multiple_of(PANEL).unwrap_or(usize::MAX)];
        let bytes = count(shape).and_then(|n| n.checked_mul(size_of::<f32>()));
        if bytes.is_none_or(|n| isize::try_from(n).is_err()) {
            return Err(Error::TooLarge { argument: "weights", shape: [1, 1, inputs, outputs] });
        }
        length("weights", data.len(), inputs * outputs)?;
        let mut panels = AVec::new(64);
        panels.resize(shape[2] * shape[3], T::default());
        for (index, panel) in panels.chunks_exact_mut((inputs * PANEL).max(1)).enumerate() {
            let first = index * PANEL;
            let columns = PANEL.min(outputs - first);
            match layout {
                WeightLayout::InOut => {
                    for (to, from) in panel.chunks_exact_mut(PANEL).zip(data.chunks_exact(outputs)) {
                        to[..columns].copy_from_slice(&from[first..][..columns]);
                    }
                }
                WeightLayout::OutIn => {
                    for column in 0..columns {
                        let from = &data[(first + column) * inputs..][..inputs];
                        for (to, x) in panel.chunks_exact_mut(PANEL).zip(from) {
                            to[column] = *x;
                        }
                    }
                }
            }
        }
        Ok(Self { inputs, outputs, panels: T::panels(panels) })
    }

    /// The weights as they were before packing, exactly, in either layout.
    pub fn unpack(&self, layout: WeightLayout) -> Vec<f32> {
        let (inputs, outputs) = (self.inputs, self.outputs);
        let at = |t: usize, o: usize| {
            let index = (o / PANEL * inputs + t) * PANEL + o % PANEL;
            match &self.panels {
                Panels::F32(x) => x[index],
                Panels::F16(x) => x[index].to_f32(),
                Panels::Bf16(x) => x[index].to_f32(),
            }
        };
        let (rows, columns) = match layout {
            WeightLayout::OutIn => (outputs, inputs),
            WeightLayout::InOut => (inputs, outputs),
        };
        let element = |row, column| match layout {
            WeightLayout::OutIn => at(column, row),
            WeightLayout::InOut => at(row, column),
        };
        (0..rows).flat_map(|row| (0..columns).map(move |column| element(row, column))).collect()
    }

    /// Features that go in.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Features that come out.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Others of the same type as these, rounded to the nearest: see [`Weights::pack`].
    ///
    /// # Errors
    /// As [`Weights::pack`].
    pub fn pack_like(
        &self,
        data: &[f32],
        layout: WeightLayout,
        inputs: usize,
        outputs: usize,
    ) -> Result<Self, Error> {
        fn rounded<T: Element>(data: &[f32]) -> Vec<T> {
            data.iter().map(|&x| T::from_f32(x)).collect()
        }
        match self.panels {
            Panels::F32(_) => Self::pack(data, layout, inputs, outputs),
            Panels::F16(_) => Self::pack(&rounded::<f16>(data), layout, inputs, outputs),
            Panels::Bf16(_) => Self::pack(&rounded::<bf16>(data), layout, inputs, outputs),
        }
    }

    /// Their type.
    pub fn dtype(&self) -> DType {
        match self.panels {
            Panels::F32(_) => DType::F32,
            Panels::F16(_) => DType::F16,
            Panels::Bf16(_) => DType::Bf16,
        }
    }

    /// Bytes held, padding included.
    pub fn bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(x) => size_of_val(&x[..]),
            Panels::F16(x) => size_of_val(&x[..]),
            Panels::Bf16(x) => size_of_val(&x[..]),
        }
    }

    pub(crate) fn panels(&self) -> usize {
        self.outputs.div_ceil(PANEL)
    }

    /// The weights of a panel, `[in][64]`, from input `at` on, `steps` inputs.
    #[inline(always)]
    pub(crate) fn chunk(&self, panel: usize, at: usize, steps: usize) -> Chunk<'_> {
        let start = (panel * self.inputs + at) * PANEL;
        let range = start..start + steps * PANEL;
        match &self.panels {
            Panels::F32(x) => Chunk::F32(&x[range]),
            Panels::F16(x) => Chunk::F16(&x[range]),
            Panels::Bf16(x) => Chunk::Bf16(&x[range]),
        }
    }
}
