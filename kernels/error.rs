//! The one error type: what a call can be refused for, always before any work is done.

use core::fmt;

use crate::{DType, Level};

/// Why a view, an option or a call was refused. Nothing has been computed or written when one is returned.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// A view reaches outside its slice.
    OutOfBounds {
        /// Sizes of the axes.
        shape: [usize; 4],
        /// Element strides of the axes.
        strides: [isize; 4],
        /// Index of element `[0, 0, 0, 0]` in the slice.
        offset: usize,
        /// Length of the slice.
        len: usize,
    },
    /// A product of sizes does not fit in `isize`.
    TooLarge {
        /// The argument the sizes belong to.
        argument: &'static str,
        /// The sizes.
        shape: [usize; 4],
    },
    /// Two elements of a writable view could be the same place in memory.
    Overlap {
        /// Sizes of the axes.
        shape: [usize; 4],
        /// Element strides of the axes.
        strides: [isize; 4],
    },
    /// A mask or bias has more than four axes.
    Rank {
        /// The number of axes given.
        rank: usize,
    },
    /// An argument does not have the shape that the others ask for.
    Shape {
        /// The argument.
        argument: &'static str,
        /// Its shape.
        got: [usize; 4],
        /// The shape it must have.
        expected: [usize; 4],
    },
    /// The number of query heads is not a multiple of the number of key/value heads.
    Heads {
        /// Query heads.
        query: usize,
        /// Key/value heads.
        key: usize,
    },
    /// A mask or bias does not broadcast to `[B, Hq, Lq, Lk]`.
    Broadcast {
        /// The argument.
        argument: &'static str,
        /// Its shape, padded on the left with ones.
        got: [usize; 4],
        /// `[B, Hq, Lq, Lk]`.
        to: [usize; 4],
    },
    /// A slice with one entry per batch, head or row has the wrong length.
    Length {
        /// The argument.
        argument: &'static str,
        /// Its length.
        got: usize,
        /// The length it must have.
        expected: usize,
    },
    /// A valid length exceeds its axis.
    BeyondAxis {
        /// `kv_lens` or `q_lens`.
        argument: &'static str,
        /// The entry at fault.
        index: usize,
        /// Its value.
        got: usize,
        /// The size of the axis.
        axis: usize,
    },
    /// Sequences that do not lie in a tensor, or a tensor that cannot be packed.
    Packed {
        /// Sizes of the axes: one batch entry is needed.
        shape: [usize; 4],
        /// The last of the starts, if there is one: they must not fall, and end inside the token axis.
        end: Option<usize>,
    },
    /// A pool that cannot be paged, or a table without whole rows.
    Paged {
        /// Sizes of the axes: pages of at least one token are needed.
        pool: [usize; 4],
        /// Entries of the table.
        table: usize,
        /// Rows of the table, one for each length.
        rows: usize,
    },
    /// A table names a page that is not there.
    Page {
        /// The entry at fault.
        index: usize,
        /// The page.
        got: usize,
        /// Pages of the pool.
        pages: usize,
    },
    /// An argument has another type than it must have.
    Type {
        /// The argument.
        argument: &'static str,
        /// Its type.
        got: DType,
        /// What it must be.
        expected: DType,
    },
    /// Scales do not fit the integers that they belong to.
    Scales {
        /// The scales' shape.
        got: [usize; 4],
        /// The shape of the integers.
        view: [usize; 4],
    },
    /// Integers without scales.
    NoScales {
        /// The argument.
        argument: &'static str,
    },
    /// A batch entry has other lengths in two arguments.
    Tokens {
        /// The argument.
        argument: &'static str,
        /// The batch entry.
        b: usize,
        /// Its tokens.
        got: usize,
        /// The tokens it must have.
        expected: usize,
    },
    /// A cache has no room for more tokens.
    Full {
        /// The sequence.
        b: usize,
        /// Tokens that it has.
        len: usize,
        /// Tokens to append.
        more: usize,
        /// Room for tokens.
        capacity: usize,
    },
    /// A rolling cache cannot be truncated: what made room for newer tokens is gone.
    Rolled {
        /// The sequence.
        b: usize,
        /// The length asked for.
        len: usize,
    },
    /// A range of heads or queries that does not lie on its axis, or ends before it starts.
    Range {
        /// `heads` or `queries`.
        argument: &'static str,
        /// Its start and end.
        got: [usize; 2],
        /// The size of the axis.
        axis: usize,
    },
    /// A number that the formula does not allow.
    Value {
        /// The argument.
        argument: &'static str,
        /// The number.
        got: f32,
        /// What it must be.
        must: &'static str,
    },
    /// `D = 0` has no default scale `1/sqrt(D)`; give one.
    NoDefaultScale,
    /// A level name that is not one of [`Level::ALL`].
    UnknownLevel {
        /// The name.
        name: String,
    },
    /// A level that this processor does not have.
    LevelUnavailable {
        /// The level.
        level: Level,
    },
}

impl std::error::Error for Error {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::OutOfBounds { shape, strides, offset, len } => write!(
                f,
                "a view of shape {shape:?}, strides {strides:?} and offset {offset} reaches outside \
                 its slice of {len} elements"
            ),
            Error::TooLarge { argument, shape } => {
                write!(f, "{argument}: the sizes {shape:?} multiply to more than can be addressed")
            }
            Error::Overlap { shape, strides } => write!(
                f,
                "out: shape {shape:?} with strides {strides:?} may put two elements in the same place"
            ),
            Error::Rank { rank } => write!(f, "a mask or bias has 1 to 4 axes, not {rank}"),
            Error::Shape { argument, got, expected } => {
                write!(f, "{argument} has shape {got:?}, expected {expected:?}")
            }
            Error::Heads { query, key } => {
                write!(f, "{query} query heads are not a multiple of {key} key/value heads")
            }
            Error::Broadcast { argument, got, to } => {
                write!(f, "{argument} of shape {got:?} does not broadcast to [B, Hq, Lq, Lk] = {to:?}")
            }
            Error::Length { argument, got, expected } => {
                write!(f, "{argument} has {got} entries, expected {expected}")
            }
            Error::BeyondAxis { argument, index, got, axis } => {
                write!(f, "{argument}[{index}] is {got}, but the axis has {axis}")
            }
            Error::Packed { shape: [b, ..], .. } if *b != 1 => {
                write!(f, "sequences are packed in one batch entry, not {b}")
            }
            Error::Packed { shape: [_, _, tokens, _], end } => write!(
                f,
                "starts of sequences must not fall, and end inside the {tokens} tokens; the last is {end:?}"
            ),
            Error::Paged { pool, table, rows } => {
                write!(f, "a pool of shape {pool:?} cannot be paged by {table} entries for {rows} sequences")
            }
            Error::Page { index, got, pages } => {
                write!(f, "table[{index}] is page {got}, but the pool has {pages}")
            }
            Error::Type { argument, got, expected } => {
                write!(f, "{argument} is of type {got}, expected {expected}")
            }
            Error::Scales { got, view } => {
                write!(f, "scales of shape {got:?} do not fit integers of shape {view:?}")
            }
            Error::NoScales { argument } => write!(f, "{argument} is of integers without scales"),
            Error::Tokens { argument, b, got, expected } => {
                write!(f, "{argument} has {got} tokens in batch entry {b}, expected {expected}")
            }
            Error::Full { b, len, more, capacity } => {
                write!(f, "sequence {b} holds {len} tokens and has no room for {more} more, of {capacity}")
            }
            Error::Rolled { b, len } => {
                write!(f, "sequence {b} has rolled: it cannot go back to {len} tokens")
            }
            Error::Range { argument, got: [start, end], axis } => {
                write!(f, "{argument} {start}..{end} is not a range of an axis of {axis}")
            }
            Error::Value { argument, got, must } => write!(f, "{argument} is {got}, must be {must}"),
            Error::NoDefaultScale => {
                write!(f, "scale: D is 0, so the default 1/sqrt(D) does not exist; give a scale")
            }
            Error::UnknownLevel { name } => {
                write!(f, "level {name:?} is unknown; the levels are")?;
                Level::ALL.iter().try_for_each(|level| write!(f, " {level}"))
            }
            Error::LevelUnavailable { level } => {
                write!(f, "level {level} is not available on this processor; available are")?;
                Level::available().try_for_each(|level| write!(f, " {level}"))
            }
        }
    }
}
