//! The terms of the formula, owned, and how to run it.

use std::borrow::Cow;

use candle_core::{CpuStorage, DType, Layout, Result, Storage, Tensor, bail};
use headwise::{Attention, Level, Position, Precision, View};

use crate::op::{NAME, on_cpu, refusal, view};

/// What [`sdpa`](crate::sdpa) computes beyond `softmax(QKᵀ/√D)V`. A key is visible to a query only if causal,
/// window, lengths, mask and bias all let it be.
#[derive(Debug, Clone, Default)]
pub struct Options {
    pub(crate) scale: Option<f32>,
    pub(crate) softcap: Option<f32>,
    pub(crate) causal: bool,
    pub(crate) window: [Option<usize>; 2],
    pub(crate) position: Position<'static>,
    pub(crate) offsets: Option<Vec<i64>>,
    pub(crate) mask: Option<Tensor>,
    pub(crate) bias: Option<Tensor>,
    pub(crate) kv_lens: Option<Vec<usize>>,
    pub(crate) q_lens: Option<Vec<usize>>,
    pub(crate) slopes: Option<Vec<f32>>,
    pub(crate) sinks: Option<Vec<f32>>,
    pub(crate) gates: Option<Vec<f32>>,
    pub(crate) backward: Backward,
    level: Option<Level>,
    precision: Precision,
    sequential: bool,
}

/// What a backward pass through the operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backward {
    /// It is an error.
    #[default]
    Refuse,
    /// The formula is computed again in candle's own operations, with all of the scores at once, and candle
    /// differentiates it: gradients of `q`, `k` and `v`, in f32. A NaN or infinity in a hidden key or value
    /// shows in them.
    Plain,
}

impl Options {
    /// Plain attention.
    pub fn new() -> Self {
        Self::default()
    }

    /// The factor on `<q, k>`; without it `1/sqrt(D)`.
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Caps the scaled scores smoothly: `cap * tanh(x / cap)`.
    pub fn softcap(mut self, cap: f32) -> Self {
        self.softcap = Some(cap);
        self
    }

    /// Hides the keys behind the query. With a cache the last query stands at the last key: see
    /// [`Options::position`].
    pub fn causal(mut self) -> Self {
        self.causal = true;
        self
    }

    /// Hides the keys more than `left` before and more than `right` behind the query; `None` leaves that side
    /// open. "The last W keys, self included" is `left = W - 1` with `right = 0`.
    pub fn window(mut self, left: Option<usize>, right: Option<usize>) -> Self {
        self.window = [left, right];
        self
    }

    /// Where the queries stand among the keys, for causal, window and slopes; by default the last valid query
    /// at the last valid key.
    pub fn position(mut self, position: Position<'static>) -> Self {
        (self.position, self.offsets) = (position, None);
        self
    }

    /// As [`Options::position`], one offset per batch entry: query `i` of entry `b` stands at key
    /// `i + offsets[b]`.
    pub fn offsets(mut self, offsets: impl Into<Vec<i64>>) -> Self {
        self.offsets = Some(offsets.into());
        self
    }

    /// A mask of type U8, **not 0 = attend**, of any shape that broadcasts to `[B, Hq, Lq, Lk]`. A mask that
    /// is 1 where a pair is blocked is `mask.eq(0u8)?` here.
    pub fn mask(mut self, mask: &Tensor) -> Self {
        self.mask = Some(mask.clone());
        self
    }

    /// A bias (F32; other float types are converted), added to the scaled and capped scores, of any shape
    /// that broadcasts to `[B, Hq, Lq, Lk]`; `-inf` hides the pair like the mask.
    pub fn bias(mut self, bias: &Tensor) -> Self {
        self.bias = Some(bias.clone());
        self
    }

    /// The number of valid keys of each batch entry; what lies behind is never read.
    pub fn kv_lens(mut self, lens: impl Into<Vec<usize>>) -> Self {
        self.kv_lens = Some(lens.into());
        self
    }

    /// The number of valid queries of each batch entry; rows behind come out as zeros.
    pub fn q_lens(mut self, lens: impl Into<Vec<usize>>) -> Self {
        self.q_lens = Some(lens.into());
        self
    }

    /// ALiBi slopes, one per query head: `slope * |pos(i) - j|` is subtracted from the scores. See
    /// [`headwise::alibi_slopes`].
    pub fn slopes(mut self, slopes: impl Into<Vec<f32>>) -> Self {
        self.slopes = Some(slopes.into());
        self
    }

    /// Sink logits, one per query head: they take part in the denominator as a key without a value.
    pub fn sinks(mut self, sinks: impl Into<Vec<f32>>) -> Self {
        self.sinks = Some(sinks.into());
        self
    }

    /// Factors on each query head's output. A head whose gate is 0 costs nothing.
    pub fn gates(mut self, gates: impl Into<Vec<f32>>) -> Self {
        self.gates = Some(gates.into());
        self
    }

    /// What a backward pass does: by default it is refused.
    pub fn backward(mut self, backward: Backward) -> Self {
        self.backward = backward;
        self
    }

    /// Forces an instruction set. Without it the environment variable `HEADWISE_LEVEL` decides, and without
    /// that the processor.
    pub fn level(mut self, level: Level) -> Self {
        self.level = Some(level);
        self
    }

    /// How bf16 inputs are multiplied; by default [`Precision::Fast`].
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Computes on the calling thread alone; without it the current rayon pool is used.
    pub fn sequential(mut self) -> Self {
        self.sequential = true;
        self
    }

    /// Hands the options to `run` as headwise's, with the views that it computes on.
    pub(crate) fn with<T, C, R>(
        &self,
        q: View<'_, T>,
        kv: [View<'_, C>; 2],
        run: impl for<'x> FnOnce(
            Attention<'x>,
            View<'x, T>,
            [View<'x, C>; 2],
        ) -> std::result::Result<R, headwise::Error>,
    ) -> Result<R> {
        let bias = self.bias.as_ref().map(|bias| bias.to_dtype(DType::F32)).transpose()?;
        for (argument, tensor) in [("mask", &self.mask), ("bias", &bias)] {
            if let Some(tensor) = tensor {
                on_cpu(argument, tensor)?;
            }
        }
        let mask = self.mask.as_ref().map(Tensor::storage_and_layout);
        let bias = bias.as_ref().map(Tensor::storage_and_layout);
        let mask = match &mask {
            Some((storage, layout)) => Some((booleans(storage)?, *layout)),
            None => None,
        };
        let bias = match &bias {
            Some((storage, layout)) => Some((cpu(storage)?.as_slice::<f32>()?, *layout)),
            None => None,
        };
        let mask = mask.as_ref().map(|(data, layout)| read("mask", data, layout)).transpose()?;
        let bias = bias.as_ref().map(|(data, layout)| read("bias", data, layout)).transpose()?;

        let mut attention = Attention::with_terms(headwise::Terms {
            scale: self.scale,
            softcap: self.softcap,
            causal: self.causal,
            left: self.window[0],
            right: self.window[1],
            position: self.offsets.as_deref().map_or(self.position, Position::Each),
            mask,
            bias,
            kv_lens: self.kv_lens.as_deref(),
            q_lens: self.q_lens.as_deref(),
            slopes: self.slopes.as_deref(),
            sinks: self.sinks.as_deref(),
            gates: self.gates.as_deref(),
        });
        attention = attention.precision(self.precision);
        if let Some(level) = self.level {
            attention = attention.level(level);
        }
        if self.sequential {
            attention = attention.sequential();
        }
        run(attention, q, kv).map_err(refusal)
    }
}

fn cpu(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => bail!("{NAME}: a tensor that does not lie on the CPU"),
    }
}

fn read<'a, T>(argument: &str, data: &'a [T], layout: &Layout) -> Result<View<'a, T>> {
    view(data, layout).map_err(|error| refusal(format!("{argument}: {error}")))
}

/// Bytes as booleans: in place where they are 0 and 1 only, as comparisons make them.
fn booleans(storage: &Storage) -> Result<Cow<'_, [bool]>> {
    let CpuStorage::U8(bytes) = cpu(storage)? else {
        bail!("{NAME}: mask must be U8 (not 0 = attend); a mask of numbers to add is a bias");
    };
    Ok(match bytemuck::checked::try_cast_slice(bytes.as_slice()) {
        Ok(booleans) => Cow::Borrowed(booleans),
        Err(_) => Cow::Owned(bytes.iter().map(|&byte| byte != 0).collect()),
    })
}
