//! Fast and exact multi-head attention on CPUs.
//!
//! ```text
//! s(i,j) = cap(scale * <q_i, k_j>) + bias(i,j) - slope * |pos(i) - j|
//! cap(x) = softcap * tanh(x / softcap), or x
//! p(i,j) = exp(s(i,j) - lse(i))    over the visible keys j
//! lse(i) = ln(sum over visible j of exp(s(i,j)) + exp(sink))
//! out_i  = gate * sum over visible j of p(i,j) * v_j
//! ```
//!
//! One fused pass computes this for any head sizes, any strides and any grouping of query heads on key/value
//! heads, without ever holding a row of scores: about 1 MiB of scratch a thread whatever the lengths.
//!
//! ```
//! use headwise::{Attention, View, ViewMut};
//!
//! // Two sequences of 5 tokens, 4 query heads on 2 key/value heads of 8 features, tokens outside the heads.
//! let (b, l, hq, hk, d) = (2, 5, 4, 2, 8);
//! let q: Vec<f32> = (0..b * l * hq * d).map(|i| (i as f32).sin()).collect();
//! let k: Vec<f32> = (0..b * l * hk * d).map(|i| (i as f32).cos()).collect();
//! let v: Vec<f32> = (0..b * l * hk * d).map(|i| (i as f32 * 0.5).sin()).collect();
//! let mut out = vec![0.0; b * l * hq * d];
//!
//! Attention::new().causal().run(
//!     View::blhd(&q, [b, l, hq, d])?,
//!     View::blhd(&k, [b, l, hk, d])?,
//!     View::blhd(&v, [b, l, hk, d])?,
//!     ViewMut::blhd(&mut out, [b, l, hq, d])?,
//! )?;
//! assert_eq!(out[..d], v[..d]); // the first query sees the first key only
//! # Ok::<(), headwise::Error>(())
//! ```
//!
//! # Names
//!
//! | name | meaning | shape |
//! |---|---|---|
//! | `q`, `k` | queries, keys | `[B, Hq, Lq, D]`, `[B, Hk, Lk, D]` |
//! | `v`, `out` | values, result | `[B, Hk, Lk, Dv]`, `[B, Hq, Lq, Dv]` |
//! | `lse` | logarithm of the softmax denominator | `[B, Hq, Lq]` |
//! | `b`, `hq`, `hk` | batch entries, query heads, key/value heads (`hq` is a multiple of `hk`) | |
//! | `lq`, `lk`, `d`, `dv` | queries, keys, features of a query or key, features of a value | |
//! | `m`, `l` | running maximum and running sum of a query row | |
//!
//! # Map
//!
//! | file | idea |
//! |---|---|
//! | `attention.rs` | the options and the call |
//! | `plan.rs` | splits the work into tasks and runs them on threads |
//! | `workspace.rs` | memory that the caller owns |
//! | `cache.rs` | keys and values kept between the steps of a model |
//! | `layer.rs`, `layer/` | multi-head attention as a layer: projections, rotary positions, norms, PyTorch's semantics |
//! | `analysis.rs`, `analysis/` | what heads do: statistics, patterns, similarity, importance |
//! | `merge.rs` | joins results over parts of the keys |
//! | `reference.rs` | the formula in f64, the arbiter of every test |
//! | `kernels/` | views, checks and the vector code: a crate of its own, the only one with unsafe code |
#![forbid(unsafe_code)]

pub mod analysis;
mod attention;
mod cache;
pub mod layer;
mod merge;
mod plan;
pub mod reference;
mod workspace;

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub use analysis::{
    HeadStatistics, Statistic, Statistics, StatisticsOptions, importance, patterns, similarity,
};
pub use attention::{Attention, Precision, alibi_slopes};
pub use cache::{CacheLayout, CacheShape, KvCache, WhenFull};
pub use headwise_kernels::{
    DType, Element, Error, Level, Part, Position, RowStatistics, Stage, Stored, Terms, View, ViewMut,
};
pub use layer::{AttentionBlock, Linear, MultiHead, MultiHeadConfig, Norm, Rotary, Tokens};
pub use merge::{Partial, merge};
pub use plan::{Plan, Run, Threads};
pub use workspace::Workspace;
