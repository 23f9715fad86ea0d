//! Rows as the tokens of sequences.

use headwise_kernels::{Element, Error, View, ViewMut};

/// The tokens of a batch of sequences: a row of features each, one after the other, no padding between.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a> {
    data: &'a [f32],
    rows: Rows<'a>,
    positions: Option<&'a [usize]>,
}

#[derive(Debug, Clone, Copy)]
enum Rows<'a> {
    Even { batch: usize, tokens: usize },
    Ragged { starts: &'a [usize] },
}

impl<'a> Tokens<'a> {
    /// `batch` sequences of `tokens` tokens each: `data [batch, tokens, features]`.
    pub fn even(data: &'a [f32], batch: usize, tokens: usize) -> Self {
        Self { data, rows: Rows::Even { batch, tokens }, positions: None }
    }

    /// Sequences of different lengths: sequence `b` has the rows `starts[b]..starts[b + 1]` of
    /// `data [starts.last(), features]`.
    ///
    /// # Errors
    /// [`Error::Range`] unless `starts` begins with 0 and never falls.
    pub fn ragged(data: &'a [f32], starts: &'a [usize]) -> Result<Self, Error> {
        match starts {
            [0, ..] if starts.is_sorted() => {
                Ok(Self { data, rows: Rows::Ragged { starts }, positions: None })
            }
            _ => {
                let got = [starts.first().copied().unwrap_or(0), starts.last().copied().unwrap_or(0)];
                Err(Error::Range { argument: "starts", got, axis: got[1] })
            }
        }
    }

    /// The position of each row, for rotary embeddings; without it tokens count from 0, or from where a cache
    /// ends.
    pub fn positions(mut self, positions: &'a [usize]) -> Self {
        self.positions = Some(positions);
        self
    }

    /// The features, row by row.
    pub fn data(&self) -> &'a [f32] {
        self.data
    }

    /// Sequences.
    pub fn batch(&self) -> usize {
        match self.rows {
            Rows::Even { batch, .. } => batch,
            Rows::Ragged { starts } => starts.len() - 1,
        }
    }

    /// Rows: the tokens of all sequences together.
    pub fn rows(&self) -> usize {
        match self.rows {
            Rows::Even { batch, tokens } => batch.saturating_mul(tokens),
            Rows::Ragged { starts } => starts[starts.len() - 1],
        }
    }

    /// Tokens of sequence `b`.
    pub fn len(&self, b: usize) -> usize {
        match self.rows {
            Rows::Even { tokens, .. } => tokens,
            Rows::Ragged { starts } => starts[b + 1] - starts[b],
        }
    }

    /// The first row of sequence `b`.
    pub fn start(&self, b: usize) -> usize {
        match self.rows {
            Rows::Even { tokens, .. } => b * tokens,
            Rows::Ragged { starts } => starts[b],
        }
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows() == 0
    }

    /// The same rows with other features.
    pub fn with_data<'b>(&self, data: &'b [f32]) -> Tokens<'b>
    where
        'a: 'b,
    {
        Tokens { data, ..*self }
    }

    /// Sequence and place in it of a row.
    pub(crate) fn find(&self, row: usize) -> [usize; 2] {
        match self.rows {
            Rows::Even { tokens, .. } => [row / tokens, row % tokens],
            Rows::Ragged { starts } => {
                let b = starts.partition_point(|&start| start <= row) - 1;
                [b, row - starts[b]]
            }
        }
    }

    /// The position of a row whose sequence begins at `first(b)`.
    pub(crate) fn position(&self, row: usize, first: impl Fn(usize) -> usize) -> usize {
        match self.positions {
            Some(positions) => positions[row],
            None => {
                let [b, i] = self.find(row);
                first(b) + i
            }
        }
    }

    /// Checks that there are `rows * width` features, and a position a row if there are any.
    pub(crate) fn check(&self, argument: &'static str, width: usize) -> Result<(), Error> {
        let shape = [1, 1, self.rows(), width];
        let expected = self.rows().checked_mul(width).ok_or(Error::TooLarge { argument, shape })?;
        if self.data.len() != expected {
            return Err(Error::Length { argument, got: self.data.len(), expected });
        }
        match self.positions {
            Some(positions) if positions.len() != self.rows() => {
                Err(Error::Length { argument: "positions", got: positions.len(), expected: self.rows() })
            }
            _ => Ok(()),
        }
    }

    /// `data [rows, heads, d]` as the tensor of a call.
    pub(crate) fn view<'v, T: Element>(
        &self,
        data: &'v [T],
        heads: usize,
        d: usize,
    ) -> Result<View<'v, T>, Error>
    where
        'a: 'v,
    {
        match self.rows {
            Rows::Even { batch, tokens } => View::blhd(data, [batch, tokens, heads, d]),
            Rows::Ragged { starts } => View::blhd(data, [1, self.rows(), heads, d])?.packed(starts),
        }
    }

    pub(crate) fn view_mut<'v, T: Element>(
        &self,
        data: &'v mut [T],
        heads: usize,
        d: usize,
    ) -> Result<ViewMut<'v, T>, Error>
    where
        'a: 'v,
    {
        match self.rows {
            Rows::Even { batch, tokens } => ViewMut::blhd(data, [batch, tokens, heads, d]),
            Rows::Ragged { starts } => ViewMut::blhd(data, [1, self.rows(), heads, d])?.packed(starts),
        }
    }
}

/// At least `rows * width` numbers, of which those are returned.
pub(crate) fn buffer(memory: &mut Vec<f32>, rows: usize, width: usize) -> Result<&mut [f32], Error> {
    let shape = [1, 1, rows, width];
    let n = rows.checked_mul(width).filter(|n| isize::try_from(n.saturating_mul(size_of::<f32>())).is_ok());
    let n = n.ok_or(Error::TooLarge { argument: "workspace", shape })?;
    if memory.len() < n {
        memory.resize(n, 0.0);
    }
    Ok(&mut memory[..n])
}
