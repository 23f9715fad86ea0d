//! What a row of attention looks like, in numbers.

/// The statistics of one query row. `p(j)` are its weights; a sink is one more key, without index, place and
/// value: its weight counts in the entropy and nowhere else. All numbers of a row that sees no key are 0.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
pub struct RowStatistics {
    /// `-sum over j of p(j) ln p(j)`, in nats, the sink's term included.
    pub entropy: f32,
    /// The entropy divided by that of equal weights, the logarithm of the number of visible keys (with a
    /// sink, one more); 0 where that number is below 2.
    pub normalised_entropy: f32,
    /// The largest weight of a key.
    pub largest: f32,
    /// The weight of key 0.
    pub first: f32,
    /// The weights of the special keys together.
    pub special: f32,
    /// `sum over j of p(j) (pos - j)`: positive where the row looks back.
    pub distance: f32,
    /// `sum over j of p(j) |pos - j|`.
    pub absolute_distance: f32,
    /// The weight of the key at `pos`; 0 where there is none.
    pub diagonal: f32,
    /// The weight of the key at `pos - 1`.
    pub previous: f32,
    /// The weight of the key at `pos + 1`.
    pub next: f32,
    /// The Euclidean norm of the output, gate included.
    pub norm: f32,
    /// The key of the largest weight, the first one of equals.
    pub largest_key: u32,
    /// Visible keys.
    pub keys: u32,
}
