//! `torch.nn.MultiheadAttention`, as its documentation describes it, on this crate's layer.
//!
//! Its masks say what is *blocked*, where all else here says what is attended to; so they have names and a
//! type of their own. Where the two differ:
//!
//! | PyTorch | here |
//! |---|---|
//! | `key_padding_mask`, true = blocked | [`TorchCall::blocked_keys`] |
//! | `attn_mask` boolean, true = blocked; `[L, S]` or `[B * H, L, S]` | [`TorchMask::Blocked`] |
//! | `attn_mask` float, added | [`TorchMask::Added`] |
//! | `need_weights`, `average_attn_weights` | [`TorchWeights`] |
//! | `add_bias_kv`, `add_zero_attn` | [`TorchMultihead::with_bias_kv`], [`TorchMultihead::with_zero_attn`] |
//! | `batch_first` | [`TokenOrder`] |
//! | `kdim`, `vdim` | `key_width`, `value_width` of the layer |
//! | `dropout`, and NaN in rows that see nothing | not here; such rows are zeros |
//!
//! A slot of `add_zero_attn` has a key and a value of zeros: a score of 0 and no value, which is a sink of 0.

use headwise_kernels::{Error, Stage, Then, View, ViewMut};

use super::heads::{MultiHead, MultiHeadConfig};
use super::linear::{Linear, project};
use super::tokens::buffer;
use crate::workspace::Scratches;
use crate::{Attention, Run};

/// Which axis of the inputs and outputs comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TokenOrder {
    /// `[L, B, E]`: PyTorch's default.
    #[default]
    TokensFirst,
    /// `[B, L, E]`: `batch_first=True`.
    BatchFirst,
}

/// `attn_mask`: `[L, S]`, or `[B * H, L, S]` for each head.
#[derive(Debug, Clone, Copy, Default)]
pub enum TorchMask<'a> {
    /// None.
    #[default]
    None,
    /// True = this pair is blocked.
    Blocked(&'a [bool]),
    /// Added to the scores.
    Added(&'a [f32]),
}

/// The attention weights, if they are wanted: `S` keys, and one more for each extra slot, bias first.
#[derive(Debug, Default)]
pub enum TorchWeights<'a> {
    /// `need_weights=False`.
    #[default]
    None,
    /// `average_attn_weights=False`: `[B, H, L, S + slots]`.
    PerHead(&'a mut [f32]),
    /// The mean over the heads, `[B, L, S + slots]`.
    Averaged(&'a mut [f32]),
}

/// The arguments of a call.
#[derive(Debug, Clone, Copy, Default)]
pub struct TorchCall<'a> {
    /// `[L, B, d_model]` or `[B, L, d_model]`.
    pub query: &'a [f32],
    /// `[S, B, key_width]` or `[B, S, key_width]`.
    pub key: &'a [f32],
    /// `[S, B, value_width]` or `[B, S, value_width]`.
    pub value: &'a [f32],
    /// `B`.
    pub batch: usize,
    /// `key_padding_mask [B, S]`: true = no query of this entry sees this key.
    pub blocked_keys: Option<&'a [bool]>,
    /// `attn_mask`.
    pub mask: TorchMask<'a>,
}

/// The memory of a [`TorchMultihead`], kept from call to call.
#[derive(Debug, Default)]
pub struct TorchWorkspace {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    heads: Vec<f32>,
    shown: Vec<bool>,
    added: Vec<f32>,
    weights: Vec<f32>,
    scratch: Scratches,
}

/// A [`MultiHead`] with the calling conventions and the extra slots of `nn.MultiheadAttention`.
///
/// ```
/// use headwise::layer::{Linear, MultiHeadConfig, WeightLayout};
/// use headwise::layer::torch::{TorchCall, TorchMask, TorchMultihead, TorchWeights};
/// // One head of one feature; no query or key weights, so that all scores are 0.
/// let linear = |w: f32| Linear::new(&[w], WeightLayout::OutIn, [1, 1], None);
/// let (zero, one) = (linear(0.0)?, linear(1.0)?);
/// let layer = TorchMultihead::new(MultiHeadConfig::new(1, 1), zero.clone(), zero, one.clone(), one)?;
/// let x = [1.0, 2.0, 3.0];
/// let blocked = [false, true, true, false, false, true, false, false, false]; // above the diagonal
/// let mask = TorchMask::Blocked(&blocked);
/// let call = TorchCall { query: &x, key: &x, value: &x, batch: 1, mask, ..Default::default() };
/// let mut out = [0.0; 3];
/// layer.forward(call, TorchWeights::None, Default::default(), &mut Default::default(), &mut out)?;
/// assert_eq!(out, [1.0, 1.5, 2.0]);
/// # Ok::<(), headwise::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct TorchMultihead {
    layer: MultiHead,
    order: TokenOrder,
    /// The key and the value of `add_bias_kv`.
    bias: Option<[Vec<f32>; 2]>,
    /// One sink of 0 a head: `add_zero_attn`.
    zeros: Option<Vec<f32>>,
}

impl TorchMultihead {
    /// A layer with PyTorch's defaults: tokens first, no extra slots. The parts are those of
    /// [`MultiHead::new`].
    ///
    /// # Errors
    /// As [`MultiHead::new`].
    pub fn new(config: MultiHeadConfig, q: Linear, k: Linear, v: Linear, out: Linear) -> Result<Self, Error> {
        let layer = MultiHead::new(config, q, k, v, out)?;
        Ok(Self { layer, order: TokenOrder::default(), bias: None, zeros: None })
    }

    /// Which axis comes first.
    pub fn with_order(mut self, order: TokenOrder) -> Self {
        self.order = order;
        self
    }

    /// `add_bias_kv`: one more key and value, learned, which every query sees.
    ///
    /// # Errors
    /// [`Error::Length`] unless they have the features of all key and of all value heads.
    pub fn with_bias_kv(mut self, bias_k: &[f32], bias_v: &[f32]) -> Result<Self, Error> {
        let [_, k, v, _] = self.layer.linears();
        expect("bias_k", bias_k.len(), k.outputs())?;
        expect("bias_v", bias_v.len(), v.outputs())?;
        self.bias = Some([bias_k.to_vec(), bias_v.to_vec()]);
        Ok(self)
    }

    /// `add_zero_attn`: one more key and value, zeros, which every query sees.
    pub fn with_zero_attn(mut self) -> Self {
        self.zeros = Some(vec![0.0; self.layer.config().heads]);
        self
    }

    /// The layer.
    pub fn layer(&self) -> &MultiHead {
        &self.layer
    }

    /// Extra slots, for the size of the weights.
    pub fn slots(&self) -> usize {
        usize::from(self.bias.is_some()) + usize::from(self.zeros.is_some())
    }

    /// The layer's result, of the order and with the rows of the query, in `out`.
    ///
    /// # Errors
    /// [`Error::Length`] if a slice does not fit the others, and the errors of [`Attention::run`].
    pub fn forward(
        &self,
        call: TorchCall<'_>,
        weights: TorchWeights<'_>,
        run: Run,
        workspace: &mut TorchWorkspace,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let MultiHeadConfig { heads, kv_heads, d_k, d_v, .. } = self.layer.config();
        let [wq, wk, wv, wo] = self.layer.linears();
        let b = call.batch;
        let tokens = |data: &[f32], width: usize| data.len().checked_div(b * width).unwrap_or(0);
        let (l, s) = (tokens(call.query, wq.inputs()), tokens(call.key, wk.inputs()));
        expect("query", call.query.len(), b * l * wq.inputs())?;
        expect("key", call.key.len(), b * s * wk.inputs())?;
        expect("value", call.value.len(), b * s * wv.inputs())?;
        let keys = s + usize::from(self.bias.is_some());

        let TorchWorkspace { q, k, v, heads: joined, shown, added, weights: scores, scratch } = workspace;
        let q = buffer(q, b * l, heads * d_k)?;
        let k = buffer(k, b * keys, kv_heads * d_k)?;
        let v = buffer(v, b * keys, kv_heads * d_v)?;
        let joined = buffer(joined, b * l, heads * d_v)?;
        let rows = b * s;
        let jobs = [
            wq.job(call.query, Then::Store, q),
            wk.job(call.key, Then::Store, &mut k[..rows * kv_heads * d_k]),
            wv.job(call.value, Then::Store, &mut v[..rows * kv_heads * d_v]),
        ];
        project(run, Some(scratch), jobs)?;
        if let Some([bias_k, bias_v]) = &self.bias {
            self.insert(k, bias_k, [b, s]);
            self.insert(v, bias_v, [b, s]);
        }
        // Visible keys, and the mask as what is added: -inf hides a pair.
        let mut attention = Attention::new().on(run).scratch(scratch);
        if let Some(blocked) = call.blocked_keys {
            expect("blocked_keys", blocked.len(), b * s)?;
            shown.clear();
            for b in 0..b {
                shown.extend(blocked[b * s..][..s].iter().map(|blocked| !blocked));
                shown.resize((b + 1) * keys, true);
            }
            attention = attention.mask(View::compact(shown, &[b, 1, 1, keys])?);
        }
        let maps = |len: usize| -> Result<[usize; 2], Error> {
            match len {
                len if len == l * s => Ok([1, 1]),
                len => expect("mask", len, b * heads * l * s).map(|()| [b, heads]),
            }
        };
        let (bias, shape) = match call.mask {
            TorchMask::None => (None, [0; 2]),
            TorchMask::Added(mask) if keys == s => (Some(mask), maps(mask.len())?),
            TorchMask::Added(mask) => {
                let shape = maps(mask.len())?;
                (Some(widen(added, mask.iter().copied(), s, keys)), shape)
            }
            TorchMask::Blocked(mask) => {
                let shape = maps(mask.len())?;
                let bias = mask.iter().map(|&blocked| if blocked { f32::NEG_INFINITY } else { 0.0 });
                (Some(widen(added, bias, s, keys)), shape)
            }
        };
        if let Some(bias) = bias {
            attention = attention.bias(View::compact(bias, &[shape[0], shape[1], l, keys])?);
        }
        if let Some(zeros) = &self.zeros {
            attention = attention.sinks(zeros);
        }

        let q = self.view(q, [b, l, heads, d_k])?;
        let k = self.view(k, [b, keys, kv_heads, d_k])?;
        let v = self.view(v, [b, keys, kv_heads, d_v])?;
        let to = ViewMut::new(joined, 0, [b, heads, l, d_v], self.strides([b, l, heads, d_v]))?;
        attention.run(q, k, v, to)?;
        self.weigh(&attention, [q, k], weights, scores)?;
        project(run, Some(scratch), [wo.job(joined, Then::Store, out)])
    }

    /// Strides of the axes batch, head, token, feature where a buffer of the given sizes (batch, tokens,
    /// heads, features) has the order of the inputs.
    fn strides(&self, [b, l, heads, d]: [usize; 4]) -> [isize; 4] {
        let row = heads * d;
        let [batch, token] = match self.order {
            TokenOrder::TokensFirst => [row, b * row],
            TokenOrder::BatchFirst => [l * row, row],
        };
        [batch as isize, d as isize, token as isize, 1]
    }

    fn view<'v>(&self, data: &'v [f32], sizes: [usize; 4]) -> Result<View<'v, f32>, Error> {
        let [b, l, heads, d] = sizes;
        View::new(data, 0, [b, heads, l, d], self.strides(sizes))
    }

    /// Puts one more row behind those of each batch entry.
    fn insert(&self, data: &mut [f32], row: &[f32], [b, s]: [usize; 2]) {
        let width = row.len();
        match self.order {
            TokenOrder::TokensFirst => {
                data[b * s * width..].chunks_exact_mut(width.max(1)).for_each(|to| to.copy_from_slice(row));
            }
            TokenOrder::BatchFirst => {
                for b in (0..b).rev() {
                    let (from, to) = (b * s * width, b * (s + 1) * width);
                    data.copy_within(from..from + s * width, to);
                    data[to + s * width..][..width].copy_from_slice(row);
                }
            }
        }
    }

    /// Writes the weights, a head at a time.
    fn weigh<'v>(
        &self,
        attention: &Attention<'v>,
        [q, k]: [View<'v, f32>; 2],
        weights: TorchWeights<'_>,
        scores: &mut Vec<f32>,
    ) -> Result<(), Error> {
        let ([b, heads, l, _], keys) = (q.shape(), k.shape()[2]);
        let columns = keys + usize::from(self.zeros.is_some());
        let (out, averaged) = match weights {
            TorchWeights::None => return Ok(()),
            TorchWeights::PerHead(out) => (out, false),
            TorchWeights::Averaged(out) => (out, true),
        };
        let maps = if averaged { 1 } else { heads };
        expect("weights", out.len(), b * maps * l * columns)?;
        out.fill(0.0);
        let factor = if averaged { 1.0 / heads as f32 } else { 1.0 };
        let scores = buffer(scores, b * l, keys)?;
        for head in 0..heads {
            attention.scores(Stage::Weights, q, k, head..head + 1, 0..l, scores)?;
            for row in 0..b * l {
                let (b, i) = (row / l, row % l);
                let at = (b * maps + if averaged { 0 } else { head }) * l + i;
                let (from, to) = (&scores[row * keys..][..keys], &mut out[at * columns..][..columns]);
                to.iter_mut().zip(from).for_each(|(to, x)| *to += factor * x);
                if columns > keys {
                    to[keys] += factor * (1.0 - from.iter().sum::<f32>()); // what the sink has taken
                }
            }
        }
        Ok(())
    }
}

/// Rows of `s` numbers with zeros behind them, up to `keys`.
fn widen(to: &mut Vec<f32>, from: impl Iterator<Item = f32>, s: usize, keys: usize) -> &[f32] {
    to.clear();
    for (i, x) in from.enumerate() {
        to.push(x);
        if i % s == s - 1 {
            to.resize(to.len() + keys - s, 0.0);
        }
    }
    to
}

fn expect(argument: &'static str, got: usize, expected: usize) -> Result<(), Error> {
    if got == expected { Ok(()) } else { Err(Error::Length { argument, got, expected }) }
}
