//! Multi-head attention as a layer:
//!
//! ```text
//! Q = rotary(norm(X W_Q + b_Q))    K = rotary(norm(Xk W_K + b_K))    V = Xv W_V + b_V
//! O[:, h] = attention(Q[:, h], K[:, h / group], V[:, h / group])
//! Y = O W_O + b_O
//! ```
//!
//! `X [rows, d_model]`, a row a token; the rows of a batch of sequences lie one after the other, of equal or
//! different lengths ([`Tokens`]), without padding. Q, K and V lie as `[rows, heads, d]`, where the
//! projections write them and the attention reads them; each head writes its own columns of O, which W_O
//! reads: splitting in heads and joining them costs nothing. A [`Workspace`] of the caller's holds all that
//! lies between, so that repeated calls allocate nothing.
//!
//! ```
//! use headwise::layer::{Linear, MultiHead, MultiHeadConfig, Tokens, WeightLayout, Workspace};
//! use headwise::Attention;
//!
//! let (d, tokens) = (16, 5);
//! let weights: Vec<f32> = (0..d * d).map(|i| (i as f32).sin() / 4.0).collect();
//! let linear = || Linear::new(&weights, WeightLayout::OutIn, [d, d], None);
//! let layer = MultiHead::new(MultiHeadConfig::new(d, 4), linear()?, linear()?, linear()?, linear()?)?;
//!
//! let x: Vec<f32> = (0..tokens * d).map(|i| (i as f32).cos()).collect();
//! let mut y = vec![0.0; tokens * d];
//! let mut workspace = Workspace::new();
//! // Two sequences, of 2 and 3 tokens.
//! let x = Tokens::ragged(&x, &[0, 2, 5])?;
//! layer.forward(x, &Attention::new().causal(), &mut workspace, &mut y)?;
//! # Ok::<(), headwise::Error>(())
//! ```
//!
//! | file | idea |
//! |---|---|
//! | `linear.rs` | weights and bias, and the projections of a call |
//! | `heads.rs` | the layer: its sizes and its forward passes |
//! | `tokens.rs` | rows as sequences |
//! | `rotary.rs` | rotary positions |
//! | `norm.rs` | LayerNorm and RMSNorm |
//! | `block.rs` | the layer with its residual and norm |
//! | `weights.rs` | weights out of safetensors files |
//! | `scheme.rs` | what models call the weights of a layer |
//! | `load.rs` | a layer out of its weights |
//! | `relative.rs` | T5's bias by distance |
//! | `inspect.rs` | what a pass has left: queries, keys, values, what each head adds |
//! | `prune.rs` | the layer with fewer heads: pruned, or key/value heads pooled |
//! | `save.rs` | layers into a file and out of it again |
//! | `cost.rs` | what a layer costs: parameters, operations, memory |
//! | `torch.rs` | `nn.MultiheadAttention`: its masks, slots and orders |
//! | `reference.rs` | the layer in f64, the arbiter of its tests |

mod block;
mod cost;
mod heads;
mod inspect;
mod linear;
mod load;
mod norm;
mod prune;
pub mod reference;
mod relative;
mod rotary;
mod save;
mod scheme;
mod tokens;
pub mod torch;
mod weights;

pub use crate::workspace::Workspace;
pub use block::{AttentionBlock, NormOrder};
pub use cost::{Cost, CostShape};
pub use heads::{MultiHead, MultiHeadConfig};
pub use headwise_kernels::{Activation, Then, Weight, WeightLayout, Weights};
pub use linear::Linear;
pub use load::LayerOptions;
pub use norm::{Norm, NormKind};
pub use prune::HeadGroup;
pub use relative::{Distances, RelativeBias};
pub use rotary::{Pairing, Rotary, RotaryScaling};
pub use save::save;
pub use scheme::Scheme;
pub use tokens::Tokens;
pub use weights::{Checkpoint, Tensor, TensorError, WeightsError};
