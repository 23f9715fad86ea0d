//! LayerNorm and RMSNorm of rows:
//!
//! ```text
//! layer: y = (x - mean) / sqrt(mean of (x - mean)^2 + eps) * weight + bias
//! rms:   y = x / sqrt(mean of x^2 + eps) * weight
//! ```
//!
//! (Ba, Kiros and Hinton 2016, "Layer Normalization"; Zhang and Sennrich 2019, "Root Mean Square Layer
//! Normalization".) The variance is that of the differences from the mean, however large the mean is: a
//! second look at a row that lies in the nearest cache.

pub use headwise_kernels::NormKind;
use headwise_kernels::{Error, RowNorm};

use crate::attention::resolve_level;
use crate::plan::{self, Run};

/// A norm over the features of each row.
///
/// ```
/// use headwise::Norm;
/// let norm = Norm::layer(&[1.0; 4], None, 0.0)?;
/// let mut x = [200_001.0, 199_999.0, 200_001.0, 199_999.0];
/// norm.in_place(&mut x, Default::default())?;
/// assert_eq!(x, [1.0, -1.0, 1.0, -1.0]);
/// # Ok::<(), headwise::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Norm {
    kind: NormKind,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    eps: f32,
}

impl Norm {
    /// LayerNorm with `weight [features]` and an optional `bias [features]`.
    ///
    /// # Errors
    /// [`Error::Length`] if `bias` has another length, [`Error::Value`] if `eps` is negative or not finite.
    pub fn layer(weight: &[f32], bias: Option<&[f32]>, eps: f32) -> Result<Self, Error> {
        if let Some(bias) = bias.filter(|bias| bias.len() != weight.len()) {
            return Err(Error::Length { argument: "bias", got: bias.len(), expected: weight.len() });
        }
        if !(eps.is_finite() && eps >= 0.0) {
            return Err(Error::Value { argument: "eps", got: eps, must: "finite and not negative" });
        }
        let (weight, bias) = (weight.to_vec(), bias.map(<[f32]>::to_vec));
        Ok(Self { kind: NormKind::Layer, weight, bias, eps })
    }

    /// RMSNorm with `weight [features]`.
    ///
    /// # Errors
    /// [`Error::Value`] if `eps` is negative or not finite.
    pub fn rms(weight: &[f32], eps: f32) -> Result<Self, Error> {
        Ok(Self { kind: NormKind::Rms, ..Self::layer(weight, None, eps)? })
    }

    /// Which norm it is.
    pub fn kind(&self) -> NormKind {
        self.kind
    }

    /// Features of a row.
    pub fn features(&self) -> usize {
        self.weight.len()
    }

    /// The factors, `[features]`.
    pub fn weight(&self) -> &[f32] {
        &self.weight
    }

    /// What is added, `[features]`.
    pub fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// Added to the variance, or to the mean square.
    pub fn eps(&self) -> f32 {
        self.eps
    }

    /// Numbers that were learned.
    pub fn parameters(&self) -> usize {
        self.weight.len() + self.bias.as_ref().map_or(0, Vec::len)
    }

    /// `out = norm(x)`, both `[rows, features]`.
    ///
    /// # Errors
    /// [`Error::Length`] if a slice does not fit, [`Error::LevelUnavailable`].
    pub fn forward(&self, x: &[f32], out: &mut [f32], run: Run) -> Result<(), Error> {
        self.check(x.len())?;
        if out.len() != x.len() {
            return Err(Error::Length { argument: "out", got: out.len(), expected: x.len() });
        }
        let (level, features) = (resolve_level(run.level)?, self.features());
        let threads = plan::threads_for(run.threads, COST.saturating_mul(x.len()));
        plan::share_rows(threads, out, features, |row, out| {
            self.rows().apply(level, &x[row * features..][..out.len()], out)
        })
    }

    /// `x = norm(x)`, `[rows, features]`.
    ///
    /// # Errors
    /// As [`Norm::forward`].
    pub fn in_place(&self, x: &mut [f32], run: Run) -> Result<(), Error> {
        self.check(x.len())?;
        let level = resolve_level(run.level)?;
        let threads = plan::threads_for(run.threads, COST.saturating_mul(x.len()));
        plan::share_rows(threads, x, self.features(), |_, x| self.rows().in_place(level, x))
    }

    fn check(&self, len: usize) -> Result<(), Error> {
        let expected = len.checked_div(self.features()).unwrap_or(0) * self.features();
        if len == expected { Ok(()) } else { Err(Error::Length { argument: "x", got: len, expected }) }
    }

    fn rows(&self) -> RowNorm<'_> {
        RowNorm { kind: self.kind, weight: &self.weight, bias: self.bias(), eps: self.eps }
    }
}

/// What an element costs, in multiply-adds.
const COST: usize = 16;
