//! The weights of a projection, packed once so that no call has to.

use aligned_vec::{AVec, ConstAlign};

use crate::Error;
use crate::call::length;
use crate::view::count;

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

/// A matrix of weights `[in, out]`, packed in panels `[out / 64][in][64]` (the last one filled up with
/// zeros): what 64 outputs need lies in one stream, in the order in which it is used.
#[derive(Debug, Clone)]
pub struct Weights {
    inputs: usize,
    outputs: usize,
    panels: AVec<f32, ConstAlign<64>>,
}

impl Weights {
    /// Packs `data`, which has `inputs * outputs` elements in the given layout.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the sizes multiply beyond `isize`, [`Error::Length`] if `data` has another
    /// length.
    pub fn pack(data: &[f32], layout: WeightLayout, inputs: usize, outputs: usize) -> Result<Self, Error> {
        let shape = [1, 1, inputs, outputs.checked_next_multiple_of(PANEL).unwrap_or(usize::MAX)];
        let bytes = count(shape).and_then(|n| n.checked_mul(size_of::<f32>()));
        if bytes.is_none_or(|n| isize::try_from(n).is_err()) {
            return Err(Error::TooLarge { argument: "weights", shape: [1, 1, inputs, outputs] });
        }
        length("weights", data.len(), inputs * outputs)?;
        let mut panels = AVec::new(64);
        panels.resize(shape[2] * shape[3], 0.0);
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
        Ok(Self { inputs, outputs, panels })
    }

    /// The weights as they were before packing, in either layout.
    pub fn unpack(&self, layout: WeightLayout) -> Vec<f32> {
        let (inputs, outputs) = (self.inputs, self.outputs);
        let at = |t: usize, o: usize| self.panels[(o / PANEL * inputs + t) * PANEL + o % PANEL];
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

    /// Bytes held, padding included.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.panels[..])
    }

    pub(crate) fn panels(&self) -> usize {
        self.outputs.div_ceil(PANEL)
    }

    /// The start of a panel, `[in][64]`.
    pub(crate) fn panel(&self, index: usize) -> *const f32 {
        self.panels[index * self.inputs * PANEL..].as_ptr()
    }
}
