//! The relative bias of T5 (Raffel et al. 2020, "Exploring the Limits of Transfer Learning", section 2.1):
//! what a head adds to a score depends on how far the key lies from the query, in buckets that widen with the
//! distance.
//!
//! ```text
//! bias(h, i, j) = table[bucket(j - i)][h]
//! bucket(n) = n up to n/2 buckets of a side, then logarithmic up to max_distance; the last holds all beyond
//! ```

use headwise_kernels::Error;

/// Which distances are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Distances {
    /// Keys before the query and behind it, half of the buckets each: encoders.
    Both,
    /// Keys before the query; those behind count as at it: decoders.
    Past,
}

/// A learned bias for each bucket of distances and each head.
///
/// ```
/// use headwise::{Attention, View};
/// use headwise::layer::{Distances, RelativeBias};
/// let relative = RelativeBias::new(&[0.0, -1.0, 1.0, 2.0], [4, 1], Distances::Both, 8)?;
/// let bias = relative.scores(2, 3, 0)?; // 2 queries, the first at key 0, and 3 keys
/// assert_eq!(bias, [0.0, 2.0, 2.0, -1.0, 0.0, 2.0]);
/// let attention = Attention::new().bias(View::bhld(&bias, [1, 1, 2, 3])?);
/// # Ok::<(), headwise::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct RelativeBias {
    /// `[buckets, heads]`.
    table: Vec<f32>,
    buckets: usize,
    heads: usize,
    distances: Distances,
    max_distance: usize,
}

impl RelativeBias {
    /// Of `table [buckets, heads]`. T5 has 32 buckets and a `max_distance` of 128.
    ///
    /// # Errors
    /// [`Error::Length`] if `table` has another length; [`Error::Value`] unless there are at least two
    /// buckets on a side and `max_distance` lies beyond the half of them.
    pub fn new(
        table: &[f32],
        [buckets, heads]: [usize; 2],
        distances: Distances,
        max_distance: usize,
    ) -> Result<Self, Error> {
        let expected = buckets.saturating_mul(heads);
        if table.len() != expected {
            return Err(Error::Length { argument: "table", got: table.len(), expected });
        }
        let new = Self { table: table.to_vec(), buckets, heads, distances, max_distance };
        if new.side() < 2 {
            return Err(Error::Value {
                argument: "buckets",
                got: buckets as f32,
                must: "two or more a side",
            });
        }
        if max_distance <= new.side() / 2 {
            let must = "beyond half of a side's buckets";
            return Err(Error::Value { argument: "max_distance", got: max_distance as f32, must });
        }
        Ok(new)
    }

    /// Heads.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// The bias `[heads, queries, keys]` for [`Attention::bias`](crate::Attention::bias); query `i` stands at
    /// key `i + offset`. In a ragged batch that of the longest sequences serves all.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if there are more than can be addressed.
    pub fn scores(&self, queries: usize, keys: usize, offset: isize) -> Result<Vec<f32>, Error> {
        let mut bias = Vec::new();
        let count = self.heads.checked_mul(queries).and_then(|rows| rows.checked_mul(keys));
        if count.is_none_or(|count| bias.try_reserve_exact(count).is_err()) {
            return Err(Error::TooLarge { argument: "bias", shape: [1, self.heads, queries, keys] });
        }
        for head in 0..self.heads {
            for i in 0..queries {
                let position = offset.saturating_add_unsigned(i);
                let bucket = |j: usize| self.bucket((j as isize).saturating_sub(position));
                bias.extend((0..keys).map(|j| self.table[bucket(j) * self.heads + head]));
            }
        }
        Ok(bias)
    }

    /// Buckets of a side.
    fn side(&self) -> usize {
        match self.distances {
            Distances::Both => self.buckets / 2,
            Distances::Past => self.buckets,
        }
    }

    /// The bucket of a key `ahead` of the query. In f32 and in this order, as the models were trained.
    fn bucket(&self, ahead: isize) -> usize {
        let side = self.side();
        let (first, distance) = match self.distances {
            Distances::Both => (if ahead > 0 { side } else { 0 }, ahead.unsigned_abs()),
            Distances::Past => (0, ahead.min(0).unsigned_abs()),
        };
        let exact = side / 2;
        if distance < exact {
            return first + distance;
        }
        let log = (distance as f32 / exact as f32).ln();
        let whole = (self.max_distance as f64 / exact as f64).ln() as f32;
        let beyond = (log / whole * (side - exact) as f32) as usize;
        first + (exact + beyond).min(side - 1)
    }
}
