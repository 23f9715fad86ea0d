//! What the heads of a layer do, for people who look into models, and for those who prune them.
//!
//! Nothing here holds an attention map: the statistics come out of the fused pass itself, all else out of
//! blocks of some rows. All results are sums with the number of what was summed, so that those of many
//! batches [add up](HeadStatistics::add) with the right weights.
//!
//! ```
//! use headwise::{Attention, Statistic, StatisticsOptions, View, ViewMut};
//! let (b, h, l, d) = (2, 4, 9, 8);
//! let x: Vec<f32> = (0..b * h * l * d).map(|i| (i as f32).sin()).collect();
//! let x = View::bhld(&x, [b, h, l, d])?;
//! let mut out = vec![0.0; b * h * l * d];
//! let to = ViewMut::bhld(&mut out, [b, h, l, d])?;
//! let statistics = Attention::new().causal().run_with_statistics(x, x, x, to, &StatisticsOptions::new())?;
//! for head in statistics.heads() {
//!     for statistic in Statistic::ALL {
//!         println!("{statistic} {:?}", head.mean(statistic)); // over all rows of both batch entries
//!     }
//! }
//! # Ok::<(), headwise::Error>(())
//! ```
//!
//! A layer's queries, keys and values are where its last pass has left them:
//! [`MultiHead::projected`](crate::MultiHead::projected).
//!
//! | file | idea |
//! |---|---|
//! | `statistics.rs` | entropy, distance, masses on named keys: in the same pass as the attention |
//! | `patterns.rs` | what needs the tokens: induction, duplicates, annotated pairs |
//! | `similarity.rs` | how much two heads differ, and an order that puts like beside like |
//! | `importance.rs` | what a layer or a model loses without a head |
//! | `blocks.rs` | the attention map in blocks of rows |
//! | `reference.rs` | all of it in f64 from whole attention maps, the arbiter of the tests |

mod blocks;
pub mod importance;
pub mod patterns;
pub mod reference;
pub mod similarity;
mod statistics;

pub use statistics::{HeadStatistics, Statistic, Statistics, StatisticsOptions};
