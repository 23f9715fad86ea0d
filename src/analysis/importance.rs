//! What is lost without a head.
//!
//! Leave-one-out takes each head away in turn and looks at what changes; a gate of 0 is a head taken away.
//! The gradient of a loss with respect to the gates is its first-order form, for all heads at the price of
//! one backward pass (Michel, Levy and Neubig 2019, "Are Sixteen Heads Really Better than One?", sections 2.2
//! and 4.1). Both fill the same [`Importance`].

use headwise_kernels::Error;

use crate::Attention;
use crate::layer::{MultiHead, Tokens, Workspace};

/// A score for each head, the larger the more is lost without it: means over examples, so that those of many
/// [add up](Self::add).
#[derive(Debug, Clone, PartialEq)]
pub struct Importance {
    scores: Vec<f64>,
    examples: u64,
}

impl Importance {
    /// Scores of one example or batch, computed elsewhere.
    pub fn new(scores: Vec<f64>) -> Self {
        Self { scores, examples: 1 }
    }

    /// Of gradients of a loss with respect to the gates, `[examples, heads]`, at gates of 1: the mean of
    /// their absolute values.
    ///
    /// # Errors
    /// [`Error::Length`] if they are no whole number of examples.
    pub fn from_gradients(gradients: &[f32], heads: usize) -> Result<Self, Error> {
        let examples = gradients.len().checked_div(heads).unwrap_or(0);
        if examples * heads != gradients.len() {
            let expected = examples * heads;
            return Err(Error::Length { argument: "gradients", got: gradients.len(), expected });
        }
        let mut scores = vec![0.0; heads];
        for example in gradients.chunks_exact(heads.max(1)) {
            scores.iter_mut().zip(example).for_each(|(score, x)| *score += f64::from(x.abs()));
        }
        scores.iter_mut().for_each(|score| *score /= examples.max(1) as f64);
        Ok(Self { scores, examples: examples as u64 })
    }

    /// Takes each head away in turn: `metric` gets one gate for each head, all 1 first and then with each of
    /// them 0, and returns a number that is worse the larger it is (a loss; or a score, negated). A head's
    /// score is by how much the metric grows without it.
    ///
    /// ```
    /// use headwise::importance::Importance;
    /// // A model of three heads, of which the second contributes most.
    /// let loss = |gates: &[f32]| Ok::<_, ()>(10.0 - f64::from(gates[0] + 5.0 * gates[1] + 2.0 * gates[2]));
    /// let importance = Importance::leave_one_out(3, loss).unwrap();
    /// assert_eq!(importance.scores(), [1.0, 5.0, 2.0]);
    /// assert_eq!(importance.ranking(), [1, 2, 0]);
    /// ```
    ///
    /// # Errors
    /// The first one of `metric`.
    pub fn leave_one_out<E>(
        heads: usize,
        mut metric: impl FnMut(&[f32]) -> Result<f64, E>,
    ) -> Result<Self, E> {
        let mut gates = vec![1.0; heads];
        let whole = metric(&gates)?;
        let mut scores = Vec::with_capacity(heads);
        for head in 0..heads {
            gates[head] = 0.0;
            scores.push(metric(&gates)? - whole);
            gates[head] = 1.0;
        }
        Ok(Self::new(scores))
    }

    /// Leave-one-out of a layer's self-attention with a metric of its output `y [rows, d_out]`, all heads in
    /// one sweep: the heads are computed once, then the output is projected without each in turn. See
    /// [`Importance::leave_one_out`] for the metric.
    ///
    /// # Errors
    /// As [`MultiHead::forward`].
    pub fn of_layer(
        layer: &MultiHead,
        x: Tokens<'_>,
        attention: &Attention<'_>,
        workspace: &mut Workspace,
        mut metric: impl FnMut(&[f32]) -> f64,
    ) -> Result<Self, Error> {
        let mut y = vec![0.0; x.rows().saturating_mul(layer.config().d_out)];
        layer.forward(x, attention, workspace, &mut y)?;
        let whole = metric(&y);
        let (mut scores, mut without) = (Vec::new(), vec![0.0; y.len()]);
        layer.contributions(x, attention.runs_on(), workspace, |_, part| {
            without.iter_mut().zip(&y).zip(part).for_each(|((without, y), part)| *without = y - part);
            scores.push(metric(&without) - whole);
        })?;
        Ok(Self::new(scores))
    }

    /// Leave-one-out of a layer's self-attention by how much its output changes, as a share of its size:
    /// `|Y - Y without h| / |Y|` in Frobenius norms.
    ///
    /// # Errors
    /// As [`MultiHead::forward`].
    pub fn of_layer_output(
        layer: &MultiHead,
        x: Tokens<'_>,
        attention: &Attention<'_>,
        workspace: &mut Workspace,
    ) -> Result<Self, Error> {
        let mut y = vec![0.0; x.rows().saturating_mul(layer.config().d_out)];
        layer.forward(x, attention, workspace, &mut y)?;
        let norm = |x: &[f32]| x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let (whole, mut scores) = (norm(&y), Vec::new());
        layer.contributions(x, attention.runs_on(), workspace, |_, part| {
            scores.push(if whole > 0.0 { norm(part) / whole } else { 0.0 });
        })?;
        Ok(Self::new(scores))
    }

    /// The scores.
    pub fn scores(&self) -> &[f64] {
        &self.scores
    }

    /// Examples or batches that they are the mean of.
    pub fn examples(&self) -> u64 {
        self.examples
    }

    /// The heads, the most important first; equal ones in their order.
    pub fn ranking(&self) -> Vec<usize> {
        let mut heads: Vec<usize> = (0..self.scores.len()).collect();
        heads.sort_by(|&a, &b| self.scores[b].total_cmp(&self.scores[a]));
        heads
    }

    /// The scores divided by their Euclidean norm: what makes those of different layers comparable (Michel et
    /// al. 2019, after Molchanov et al. 2017). Zeros stay zeros.
    pub fn normalised(&self) -> Vec<f64> {
        let norm = self.scores.iter().map(|x| x * x).sum::<f64>().sqrt();
        self.scores.iter().map(|x| if norm > 0.0 { x / norm } else { 0.0 }).collect()
    }

    /// Joins the scores of other examples, each of which weighs the same.
    ///
    /// # Errors
    /// [`Error::Length`] if `other` has another number of heads.
    pub fn add(&mut self, other: &Self) -> Result<(), Error> {
        if other.scores.len() != self.scores.len() {
            let (got, expected) = (other.scores.len(), self.scores.len());
            return Err(Error::Length { argument: "heads", got, expected });
        }
        let (mine, theirs) = (self.examples as f64, other.examples as f64);
        for (score, more) in self.scores.iter_mut().zip(&other.scores) {
            *score = (*score * mine + more * theirs) / (mine + theirs).max(1.0);
        }
        self.examples += other.examples;
        Ok(())
    }
}
