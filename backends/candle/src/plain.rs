//! The formula in candle's own operations, with all of the scores at once: what candle can differentiate.
//!
//! ```text
//! s = cap(scale * Q Kᵀ) + bias - slope * |pos - j|
//! e = exp(s - max s) where visible, else 0        max over the visible keys, sink included
//! out = gate * e V / (sum of e + exp(sink - max s))
//! ```

use candle_core::{D, DType, Device, Result, Tensor, Var, bail};
use headwise::Position;

use crate::op::NAME;
use crate::options::Options;

/// The gradients of `q`, `k` and `v`, where `grad [B, Hq, Lq, Dv]` is that of the result.
pub(crate) fn gradients(qkv: [&Tensor; 3], grad: &Tensor, options: &Options) -> Result<[Tensor; 3]> {
    let [q, k, v] = qkv.map(|tensor| Var::from_tensor(&tensor.detach().to_dtype(DType::F32)?));
    let (q, k, v) = (q?, k?, v?);
    let out = attention(&q, &k, &v, options)?;
    let grads = (out * grad.to_dtype(DType::F32)?)?.sum_all()?.backward()?;
    let of = |var: &Var, tensor: &Tensor| match grads.get(var) {
        Some(grad) => grad.to_dtype(tensor.dtype()),
        None => tensor.zeros_like(), // an empty product
    };
    Ok([of(&q, qkv[0])?, of(&k, qkv[1])?, of(&v, qkv[2])?])
}

/// The formula, in f32.
fn attention(q: &Tensor, k: &Tensor, v: &Tensor, options: &Options) -> Result<Tensor> {
    let ((b, hq, lq, d), (_, hk, lk, dv)) = (q.dims4()?, v.dims4()?);
    let device = q.device();
    if [b, hq, lq, lk, d, dv].contains(&0) {
        bail!("backward is not supported for {NAME} where there is nothing to compute (q {:?})", q.shape());
    }
    let (rows, scores) = ((b, hk, hq / hk * lq, d), (b, hq, lq, lk));
    let scale = options.scale.map_or(1.0 / (d as f64).sqrt(), f64::from);
    let s = (q.contiguous()?.reshape(rows)? * scale)?.matmul(&k.t()?.contiguous()?)?.reshape(scores)?;
    let s = match options.softcap {
        Some(cap) => ((s / f64::from(cap))?.tanh()? * f64::from(cap))?,
        None => s,
    };
    let places = Places::new(options, scores);
    let mut visible = places.visible(device)?.broadcast_as(scores)?;
    if let Some(mask) = &options.mask {
        visible = visible.mul(&mask.ne(0u8)?.broadcast_as(scores)?)?;
    }
    let s = match &options.bias {
        Some(bias) => {
            let bias = bias.detach().to_dtype(DType::F32)?.broadcast_as(scores)?;
            let shown = bias.ne(f32::NEG_INFINITY)?;
            visible = visible.mul(&shown)?;
            (s + shown.where_cond(&bias, &bias.zeros_like()?)?)?
        }
        None => s,
    };
    let s = match &options.slopes {
        Some(slopes) => {
            s.sub(&places.distances(device)?.broadcast_mul(&heads(slopes, device)?)?.broadcast_as(scores)?)?
        }
        None => s,
    };
    let visible = visible.contiguous()?;

    // Hidden scores take part in nothing, so that their gradient is 0 and not 0 * infinity.
    let hidden = Tensor::full(f32::NEG_INFINITY, scores, device)?;
    let mut max = visible.where_cond(&s.detach(), &hidden)?.max_keepdim(D::Minus1)?;
    let sinks = options.sinks.as_ref().map(|sinks| heads(sinks, device)?.broadcast_as((b, hq, lq, 1)));
    let sinks = sinks.transpose()?;
    if let Some(sinks) = &sinks {
        max = max.maximum(sinks)?;
    }
    let max = max.ne(f32::NEG_INFINITY)?.where_cond(&max, &max.zeros_like()?)?;
    let zeros = s.zeros_like()?;
    let e = visible.where_cond(&s.broadcast_sub(&max)?, &zeros)?.exp()?;
    let e = visible.where_cond(&e, &zeros)?;
    let mut sum = e.sum_keepdim(D::Minus1)?;
    if let Some(sinks) = &sinks {
        sum = (sum + (sinks - &max)?.exp()?)?;
    }
    let sum = sum.ne(0f32)?.where_cond(&sum, &sum.ones_like()?)?;

    let p = e.broadcast_div(&sum)?.reshape((b, hk, hq / hk * lq, lk))?;
    let out = p.matmul(&v.contiguous()?)?.reshape((b, hq, lq, dv))?;
    match &options.gates {
        Some(gates) => out.broadcast_mul(&heads(gates, device)?),
        None => Ok(out),
    }
}

/// One number a query head, `[1, Hq, 1, 1]`.
fn heads(numbers: &[f32], device: &Device) -> Result<Tensor> {
    Tensor::from_slice(numbers, (1, numbers.len(), 1, 1), device)
}

/// Where queries and keys lie.
struct Places<'a> {
    options: &'a Options,
    scores: (usize, usize, usize, usize),
}

impl<'a> Places<'a> {
    fn new(options: &'a Options, scores: (usize, usize, usize, usize)) -> Self {
        Self { options, scores }
    }

    /// Valid queries and keys of a batch entry.
    fn lens(&self, b: usize) -> [usize; 2] {
        let (.., lq, lk) = self.scores;
        let len = |lens: &Option<Vec<usize>>, axis| lens.as_ref().map_or(axis, |lens| lens[b]);
        [len(&self.options.q_lens, lq), len(&self.options.kv_lens, lk)]
    }

    fn pos(&self, b: usize, i: usize) -> i64 {
        let [q_len, kv_len] = self.lens(b).map(|len| len as i64);
        let offset = match (&self.options.offsets, self.options.position) {
            (Some(offsets), _) => offsets[b],
            (None, Position::TopLeft) => 0,
            (None, Position::BottomRight) => kv_len - q_len,
            (None, Position::At(offset)) => offset,
            (None, Position::Each(offsets)) => offsets[b],
        };
        (i as i64).saturating_add(offset)
    }

    /// One number for each batch entry, query and key, `[B, 1, Lq, Lk]`.
    fn each<T: candle_core::WithDType>(
        &self,
        device: &Device,
        number: impl Fn(usize, usize, usize) -> T,
    ) -> Result<Tensor> {
        let (b, _, lq, lk) = self.scores;
        let rows = (0..b).flat_map(|b| (0..lq).map(move |i| (b, i)));
        let all: Vec<T> = rows
            .flat_map(|(b, i)| (0..lk).map(move |j| (b, i, j)))
            .map(|(b, i, j)| number(b, i, j))
            .collect();
        Tensor::from_vec(all, (b, 1, lq, lk), device)
    }

    /// 1 where lengths, causal and window let the query see the key.
    fn visible(&self, device: &Device) -> Result<Tensor> {
        let [left, right] = self.options.window.map(|side| side.map_or(i64::MAX, |side| side as i64));
        let right = if self.options.causal { 0 } else { right };
        self.each(device, |b, i, j| {
            let ([q_len, kv_len], pos) = (self.lens(b), self.pos(b, i));
            let near = pos.saturating_sub(left) <= j as i64 && j as i64 <= pos.saturating_add(right);
            u8::from(i < q_len && j < kv_len && near)
        })
    }

    /// `|pos(i) - j|`.
    fn distances(&self, device: &Device) -> Result<Tensor> {
        self.each(device, |b, i, j| (self.pos(b, i).saturating_sub(j as i64)).unsigned_abs() as f32)
    }
}
