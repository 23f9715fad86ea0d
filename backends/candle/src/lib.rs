//! [headwise](https://docs.rs/headwise) attention for [candle](candle_core) on CPUs.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use headwise_candle::{Options, sdpa};
//!
//! let q = Tensor::randn(0f32, 1., (1, 8, 5, 64), &Device::Cpu)?; // [B, Hq, Lq, D]
//! let k = Tensor::randn(0f32, 1., (1, 2, 5, 64), &Device::Cpu)?; // 8 query heads on 2 key/value heads
//! let v = Tensor::randn(0f32, 1., (1, 2, 5, 64), &Device::Cpu)?;
//! let y = sdpa(&q, &k, &v, &Options::new().causal())?; // [B, Hq, Lq, Dv]
//! let y = y.transpose(1, 2)?.reshape((1, 5, 8 * 64))?; // ready for the output projection; nothing is copied
//! # assert_eq!(y.dims(), [1, 5, 512]);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! | file | idea |
//! |---|---|
//! | `options.rs` | the terms of the formula, owned |
//! | `op.rs` | the operation: candle's storage and layouts as headwise's views |
//! | `flash.rs` | the same behind the signature of candle-nn's CPU flash attention |
//! | `cache.rs` | keys and values kept between the steps of a model |
//! | `heads.rs` | the layer: projections out of a `VarBuilder`, and attention |
//! | `plain.rs` | the formula in candle's own operations, for gradients |
//!
//! Tensors are read where they lie, whatever narrow, transpose, permute or broadcast have made of them.
#![forbid(unsafe_code)]

mod cache;
mod flash;
mod heads;
mod op;
mod options;
mod plain;

pub use cache::KvCache;
pub use flash::{AttnMask, flash_attn};
pub use heads::{Bias, MultiHead, MultiHeadConfig};
pub use headwise;
pub use op::sdpa;
pub use options::{Backward, Options};

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
