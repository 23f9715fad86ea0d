//! headwise behind the signature of candle-nn's CPU flash attention.

use candle_core::{DType, Result, Tensor, WithDType, bail};
use headwise::Position;

use crate::op::{NAME, sdpa};
use crate::options::Options;

/// Which keys a query sees, as in `candle_nn::attention`.
#[derive(Debug, Clone, Default)]
pub enum AttnMask {
    /// All.
    #[default]
    None,
    /// Query `i` sees the keys up to `i + kv_offset`.
    Causal {
        /// Keys before the first query: what a cache held before this step.
        kv_offset: usize,
    },
    /// Added to the scores; `-inf` hides. Of any shape that broadcasts to `[B, H, S, KV_S]`.
    Mask(Tensor),
}

impl AttnMask {
    /// Causal, the first query at the first key.
    pub fn causal() -> Self {
        AttnMask::Causal { kv_offset: 0 }
    }

    /// Causal, the first query at key `kv_offset`.
    pub fn causal_with_offset(kv_offset: usize) -> Self {
        AttnMask::Causal { kv_offset }
    }

    /// Whether it is causal.
    pub fn is_causal(&self) -> bool {
        matches!(self, AttnMask::Causal { .. })
    }

    /// The offset of a causal mask, else 0.
    pub fn kv_offset(&self) -> usize {
        match self {
            AttnMask::Causal { kv_offset } => *kv_offset,
            _ => 0,
        }
    }
}

/// `candle_nn::attention::flash_attn` of candle 0.11, computed by headwise: the same arguments, and the same
/// result but for one bug of candle's (a cap without ALiBi on a single causal query, which it takes for
/// slopes of 1).
///
/// `q (B, S, H, D)`, `k` and `v (B, KV_S, KV_H, D)` of type `T`, in any strides; the result is `(B, H, S, D)`
/// in F32. As in candle,
///
/// - a single query of a single batch entry sees all keys, whatever `kv_offset` says;
/// - of several batch entries the last query stands at the last key, whatever `kv_offset` says;
/// - ALiBi has the slopes `2^(-max_bias (h + 1) / n)`, `n` the power of two from `H` up; they multiply a mask's
///   numbers where there is one; and one batch entry without a mask has none.
///
/// Beyond candle, several batch entries may have a mask, a cap or be BF16, and a mask may differ between them
/// and between heads.
///
/// # Errors
/// As [`sdpa`]; if the inputs are not of type `T`; if a mask is not of a float type.
pub fn flash_attn<T: WithDType>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    attn_mask: AttnMask,
    max_bias: Option<f32>,
    softcap: Option<f32>,
) -> Result<Tensor> {
    for (argument, tensor) in [("q", q), ("k", k), ("v", v)] {
        if tensor.rank() != 4 {
            bail!("{NAME}: {argument} has shape {:?}, expected the axes (B, S, H, D)", tensor.shape());
        }
        if tensor.dtype() != T::DTYPE {
            bail!("{NAME}: {argument} is {:?}, but was called with {:?}", tensor.dtype(), T::DTYPE);
        }
    }
    let (b, s, h, _) = q.dims4()?;
    let mut options = Options::new().scale(softmax_scale);
    options.softcap = softcap.filter(|&cap| cap != 0.0);
    let slopes = max_bias.filter(|&max| max > 0.0).map(|max| slopes(h, max));
    options = match attn_mask {
        AttnMask::None => match slopes {
            Some(slopes) if b > 1 => options.slopes(slopes),
            _ => options,
        },
        AttnMask::Causal { kv_offset } => {
            let position = if b > 1 || s == 1 { Position::BottomRight } else { at(kv_offset) };
            let options = options.causal().position(position);
            if let Some(slopes) = slopes { options.slopes(slopes) } else { options }
        }
        AttnMask::Mask(mask) if !mask.dtype().is_float() => {
            bail!("{NAME}: mask is {:?}, expected numbers to add to the scores", mask.dtype())
        }
        AttnMask::Mask(mask) => match slopes {
            Some(slopes) => {
                let slopes = Tensor::from_vec(slopes, (h, 1, 1), mask.device())?;
                options.bias(&mask.to_dtype(DType::F32)?.broadcast_mul(&slopes)?)
            }
            None => options.bias(&mask),
        },
    };
    // Of F32 queries the result is F32, not rounded to a shorter type.
    let q = q.to_dtype(DType::F32)?;
    sdpa(&q.transpose(1, 2)?, &k.transpose(1, 2)?, &v.transpose(1, 2)?, &options)
}

fn at(kv_offset: usize) -> Position<'static> {
    Position::At(i64::try_from(kv_offset).unwrap_or(i64::MAX))
}

fn slopes(heads: usize, max_bias: f32) -> Vec<f32> {
    let n = heads.next_power_of_two() as f32;
    (0..heads).map(|h| (-max_bias * (h + 1) as f32 / n).exp2()).collect()
}
