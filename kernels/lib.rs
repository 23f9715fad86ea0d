//! The kernels of [headwise](https://docs.rs/headwise): checked views, one attention problem as a [`Call`] of
//! disjoint [`Tasks`], and the vector code that computes them at every [`Level`].
//!
//! This crate knows nothing of threads and holds all of the unsafe code. Its public functions are safe: views
//! are checked when made, calls when made from views, and each task is the exclusive right to its output
//! rows.
//!
//! | file | idea |
//! |---|---|
//! | `view.rs` | sizes and strides over a slice; where bounds are checked |
//! | `element.rs` | element types, and how they are loaded and stored |
//! | `tensor.rs` | a view whose type is known at run time, for the kernels |
//! | `convert.rs` | copies between element types |
//! | `call.rs` | the checked arguments of a call |
//! | `split.rs`, `split/` | a call cut into tasks, each with rows of its own; running them |
//! | `level.rs` | instruction sets, and the one `match` on them |
//! | `isa.rs`, `isa/` | what each instruction set adds to pulp |
//! | `prefill.rs` | the fused loop over blocks of keys |
//! | `decode.rs`, `decode/` | the same for few query rows, where reading K and V is all |
//! | `join.rs` | what some of the keys leave of a row, and joining it |
//! | `block.rs`, `block/` | a block of query rows: packing, scores, one step, output |
//! | `products.rs` | both products as tile bodies, and the online softmax between them |
//! | `map.rs` | the attention map, written out |
//! | `statistics.rs` | what a row looks like, in numbers, in the fused pass |
//! | `received.rs` | what each key receives from all rows |
//! | `divergence.rs` | how far two rows of weights are apart |
//! | `tile.rs` | the register tile: the inner loop of both products |
//! | `tiles.rs`, `pairs.rs` | products of bf16 in AMX tiles; pairs of bf16, for them and for dot products |
//! | `terms.rs` | cap, slopes, bias, mask and visibility on a block of scores |
//! | `extra.rs` | bias and mask of a block, transposed to lie beside the scores |
//! | `exp.rs` | exp, powers of 4, ln and tanh |
//! | `pack.rs` | transposes: packing Q, writing the output, copying K and V |
//! | `project.rs` | projections: inputs times weights packed once |
//! | `rows.rs` | norms and rotary positions of rows |
//! | `scratch.rs` | the memory of one thread |
//! | `error.rs` | what can be wrong with the arguments |
//! | `clock.rs` | where the time of a task goes |
//! | `measure.rs` | what the processor can do: multiply-add peak, read rate |

mod block;
mod call;
mod clock;
mod convert;
mod decode;
mod divergence;
mod element;
mod error;
mod exp;
mod extra;
mod isa;
mod join;
mod level;
mod map;
mod measure;
mod pack;
mod pairs;
mod prefill;
mod products;
mod project;
mod received;
mod rows;
mod scratch;
mod split;
mod statistics;
mod tensor;
mod terms;
mod tile;
mod tiles;
mod view;

pub use call::{Call, Position, Stage, Terms};
pub use clock::{Part, ticks};
pub use convert::convert;
pub use divergence::divergence;
pub use element::{DType, Element, Stored};
pub use error::Error;
pub use level::Level;
pub use measure::{dots, exp, fma, ln, power_of_4, read, tanh};
pub use project::{Activation, Projection, Projections, Then, Weight, WeightLayout, Weights};
pub use rows::{NormKind, Pairing, RowNorm, rotate};
pub use scratch::Scratch;
pub use split::{Kernel, Spans, Split, Tasks};
pub use statistics::{HeadSums, Observe, RowStatistics};
pub use view::{View, ViewMut};
