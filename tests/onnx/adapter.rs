//! The ONNX `Attention` operator, opsets 23 to 25, on headwise. Where the two differ:
//!
//! | ONNX | here |
//! |---|---|
//! | 3-D inputs `[B, L, H * D]` with `q_num_heads`, `kv_num_heads` | a view of `[B, L, H, D]` |
//! | `past_key`, `past_value` before `K`, `V` | joined, the one copy that is made |
//! | queries stand behind the past, or end where `nonpad_kv_seqlen` does | `Position::At`, `Position::Each` |
//! | `nonpad_kv_seqlen` | `kv_lens` |
//! | `attn_mask` boolean or float, up to 4-D | `mask` or `bias`, read in place |
//! | an `attn_mask` with fewer keys than there are hides the rest | views of the first keys |
//! | windows of -1, `softcap` 0 | none |
//! | `qk_matmul_output_mode` 0 and 1 do not know of hidden pairs | scores of the bare scale and cap |

use headwise::{Attention, Level, Position, Stage, Terms, View, ViewMut, reference};

/// A compact tensor of any rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor<T> {
    pub shape: Vec<usize>,
    pub data: Vec<T>,
}

/// The operator's inputs and attributes, under ONNX's names.
#[derive(Debug, Default)]
pub struct Node {
    pub q: Option<Tensor<f32>>,
    pub k: Option<Tensor<f32>>,
    pub v: Option<Tensor<f32>>,
    pub mask: Option<Tensor<bool>>,
    pub bias: Option<Tensor<f32>>,
    pub past_key: Option<Tensor<f32>>,
    pub past_value: Option<Tensor<f32>>,
    pub nonpad_kv_seqlen: Option<Vec<usize>>,
    pub q_num_heads: Option<usize>,
    pub kv_num_heads: Option<usize>,
    pub is_causal: bool,
    pub scale: Option<f32>,
    pub softcap: Option<f32>,
    pub left_window_size: Option<usize>,
    pub right_window_size: Option<usize>,
    pub qk_matmul_output_mode: u64,
}

/// The operator's outputs.
#[derive(Debug)]
pub struct Outputs {
    pub y: Tensor<f32>,
    pub present_key: Tensor<f32>,
    pub present_value: Tensor<f32>,
    pub qk_matmul: Tensor<f32>,
}

/// What computes.
#[derive(Debug, Clone, Copy)]
pub enum By {
    Level(Level),
    Reference,
}

impl Node {
    /// Computes the node.
    pub fn run(&self, by: By) -> Outputs {
        let q = self.q.as_ref().expect("Q");
        let present_key = join(self.past_key.as_ref(), self.k.as_ref().expect("K"), self.kv_num_heads);
        let present_value = join(self.past_value.as_ref(), self.v.as_ref().expect("V"), self.kv_num_heads);
        let total = tokens(&present_key);
        let masked = [self.mask.as_ref().map(|x| &x.shape), self.bias.as_ref().map(|x| &x.shape)];
        let masked = masked.into_iter().flatten().filter_map(|shape| shape.last().copied());
        let keys = masked.filter(|&keys| keys != 1).min().unwrap_or(total);

        let q = heads(q, self.q_num_heads, usize::MAX);
        let k = heads(&present_key, self.kv_num_heads, keys);
        let v = heads(&present_value, self.kv_num_heads, keys);
        let lens = self.nonpad_kv_seqlen.as_ref();
        let offsets: Option<Vec<i64>> =
            lens.map(|lens| lens.iter().map(|&n| n as i64 - q.shape()[2] as i64).collect());
        let lens: Option<Vec<usize>> = lens.map(|lens| lens.iter().map(|&n| n.min(keys)).collect());
        let past = self.past_key.as_ref().map_or(0, tokens);
        let bare = Terms { scale: self.scale, softcap: self.softcap, ..Terms::default() };
        let terms = Terms {
            causal: self.is_causal,
            left: self.left_window_size,
            right: self.right_window_size,
            position: offsets.as_deref().map_or(Position::At(past as i64), Position::Each),
            mask: self.mask.as_ref().map(broadcast),
            bias: self.bias.as_ref().map(broadcast),
            kv_lens: lens.as_deref(),
            ..bare
        };

        let qk = match self.qk_matmul_output_mode {
            mode @ (0 | 1) => {
                let stage = if mode == 0 { Stage::Scaled } else { Stage::Capped };
                scores(by, stage, q, heads(&present_key, self.kv_num_heads, total), &bare)
            }
            2 => widen(scores(by, Stage::Biased, q, k, &terms), keys, total, f32::NEG_INFINITY),
            3 => widen(scores(by, Stage::Weights, q, k, &terms), keys, total, 0.0),
            mode => panic!("qk_matmul_output_mode {mode}"),
        };
        let [b, hq, lq, _] = q.shape();
        let y = attend(by, q, k, v, &terms, self.q.as_ref().is_some_and(|q| q.shape.len() == 3));
        Outputs {
            y,
            present_key,
            present_value,
            qk_matmul: Tensor { shape: vec![b, hq, lq, total], data: qk },
        }
    }
}

fn attend<'a>(
    by: By,
    q: View<'a, f32>,
    k: View<'a, f32>,
    v: View<'a, f32>,
    terms: &Terms<'a>,
    merged: bool,
) -> Tensor<f32> {
    let ([b, h, l, _], dv) = (q.shape(), v.shape()[3]);
    let mut y = vec![f32::NAN; b * h * l * dv];
    match by {
        By::Level(level) => {
            let out = match merged {
                true => ViewMut::blhd(&mut y, [b, l, h, dv]),
                false => ViewMut::bhld(&mut y, [b, h, l, dv]),
            };
            let attention = Attention::with_terms(*terms).level(level);
            attention.run(q, k, v, out.expect("compact")).expect("a valid node");
        }
        By::Reference => {
            let out = reference::attention(q, k, v, terms).expect("a valid node").out;
            for (from, x) in out.into_iter().enumerate() {
                let (row, c) = (from / dv, from % dv);
                let (b, h_at, i) = (row / (h * l), row / l % h, row % l);
                let to = if merged { ((b * l + i) * h + h_at) * dv + c } else { from };
                y[to] = x as f32;
            }
        }
    }
    Tensor { shape: if merged { vec![b, l, h * dv] } else { vec![b, h, l, dv] }, data: y }
}

fn scores<'a>(by: By, stage: Stage, q: View<'a, f32>, k: View<'a, f32>, terms: &Terms<'a>) -> Vec<f32> {
    let ([b, h, l, _], keys) = (q.shape(), k.shape()[2]);
    match by {
        By::Level(level) => {
            let mut out = vec![f32::NAN; b * h * l * keys];
            let attention = Attention::with_terms(*terms).level(level);
            attention.scores(stage, q, k, 0..h, 0..l, &mut out).expect("a valid node");
            out
        }
        By::Reference => {
            let all = reference::attention(q, k, k, terms).expect("a valid node");
            let stage = match stage {
                Stage::Scaled => all.scaled,
                Stage::Capped => all.capped,
                Stage::Biased => all.biased,
                Stage::Weights => all.weights,
            };
            stage.into_iter().map(|x| x as f32).collect()
        }
    }
}

/// Rows of `keys` entries to rows of `total`.
fn widen(rows: Vec<f32>, keys: usize, total: usize, with: f32) -> Vec<f32> {
    let pad = std::iter::repeat_n(with, total - keys);
    rows.chunks(keys.max(1)).flat_map(|row| row.iter().copied().chain(pad.clone())).collect()
}

/// The number of tokens of a 3-D or 4-D tensor.
fn tokens(x: &Tensor<f32>) -> usize {
    x.shape[x.shape.len() - 2]
}

/// `[B, H, L, D]` or `[B, L, H * D]` as a view of the first tokens with the axes `[B, H, L, D]`.
fn heads(x: &Tensor<f32>, heads: Option<usize>, first: usize) -> View<'_, f32> {
    let (shape, [batch, head, token]) = match x.shape[..] {
        [b, h, l, d] => ([b, h, l.min(first), d], [h * l * d, l * d, d]),
        [b, l, width] => {
            let h = heads.expect("3-D inputs come with their numbers of heads");
            ([b, h, l.min(first), width / h], [l * width, width / h, width])
        }
        _ => panic!("{:?}", x.shape),
    };
    let strides = [batch as isize, head as isize, token as isize, 1];
    View::new(&x.data, 0, shape, strides).expect("inside")
}

fn broadcast<T>(x: &Tensor<T>) -> View<'_, T> {
    View::compact(&x.data, &x.shape).expect("1-D to 4-D")
}

/// The past `[B, H, P, D]` with new tokens behind it, `[B, H, P + L, D]`; without a past the input as it is.
fn join(past: Option<&Tensor<f32>>, new: &Tensor<f32>, num_heads: Option<usize>) -> Tensor<f32> {
    let Some(past) = past else { return new.clone() };
    let (past, new) = (heads(past, None, usize::MAX), heads(new, num_heads, usize::MAX));
    let ([b, h, p, d], l) = (past.shape(), new.shape()[2]);
    let element = |at: usize| {
        let (b, h, i, c) = (at / (h * (p + l) * d), at / ((p + l) * d) % h, at / d % (p + l), at % d);
        if i < p { past.get([b, h, i, c]) } else { new.get([b, h, i - p, c]) }
    };
    let data = (0..b * h * (p + l) * d).map(|at| element(at).expect("inside")).collect();
    Tensor { shape: vec![b, h, p + l, d], data }
}
