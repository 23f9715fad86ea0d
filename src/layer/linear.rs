//! `Y = X W + b`: weights and bias, and the projections of a call.

use headwise_kernels::{Error, Projection, Projections, Then, WeightLayout, Weights};

use crate::attention::resolve_level;
use crate::plan::{self, Run};
use crate::workspace::Scratches;

/// A linear map from `inputs` to `outputs` features, with or without a bias. Its weights are packed when it
/// is made, so that calls with few rows cost no more than reading them once.
///
/// ```
/// use headwise::layer::{Linear, Then, WeightLayout};
/// let linear = Linear::new(&[1.0, 2.0, 3.0, 4.0], WeightLayout::OutIn, [2, 2], Some(&[0.5, 0.0]))?;
/// let mut y = [0.0; 2];
/// linear.forward(&[1.0, 1.0], Then::Store, Default::default(), &mut y)?;
/// assert_eq!(y, [3.5, 7.0]);
/// # Ok::<(), headwise::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Linear {
    weights: Weights,
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// Packs `weights`, `inputs * outputs` of them in the given layout, and copies `bias`.
    ///
    /// # Errors
    /// [`Error::Length`] if a slice has another length, [`Error::TooLarge`] if the sizes multiply to more
    /// than can be addressed.
    pub fn new(
        weights: &[f32],
        layout: WeightLayout,
        [inputs, outputs]: [usize; 2],
        bias: Option<&[f32]>,
    ) -> Result<Self, Error> {
        Self::with_weights(Weights::pack(weights, layout, inputs, outputs)?, bias)
    }

    /// Packed weights, of any type, and a copy of `bias`.
    ///
    /// ```
    /// use headwise::layer::{Linear, WeightLayout, Weights};
    /// let half: Vec<half::f16> = [0.5, 2.0].map(half::f16::from_f32).to_vec(); // kept in half the memory
    /// let linear = Linear::with_weights(Weights::pack(&half, WeightLayout::OutIn, 2, 1)?, None)?;
    /// let mut y = [0.0];
    /// linear.forward(&[2.0, 3.0], Default::default(), Default::default(), &mut y)?;
    /// assert_eq!(y, [7.0]);
    /// # Ok::<(), headwise::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Length`] if `bias` has another length than there are outputs.
    pub fn with_weights(weights: Weights, bias: Option<&[f32]>) -> Result<Self, Error> {
        match bias {
            Some(bias) if bias.len() != weights.outputs() => {
                Err(Error::Length { argument: "bias", got: bias.len(), expected: weights.outputs() })
            }
            bias => Ok(Self { weights, bias: bias.map(<[f32]>::to_vec) }),
        }
    }

    /// The weights as packed.
    pub(super) fn packed(&self) -> &Weights {
        &self.weights
    }

    /// Features that go in.
    pub fn inputs(&self) -> usize {
        self.weights.inputs()
    }

    /// Features that come out.
    pub fn outputs(&self) -> usize {
        self.weights.outputs()
    }

    /// The weights as they were given, in either layout.
    pub fn weights(&self, layout: WeightLayout) -> Vec<f32> {
        self.weights.unpack(layout)
    }

    /// The bias.
    pub fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// Numbers that were learned: weights and bias.
    pub fn parameters(&self) -> usize {
        self.inputs() * self.outputs() + self.bias.as_ref().map_or(0, Vec::len)
    }

    /// Bytes held: the packed weights and the bias.
    pub fn bytes(&self) -> usize {
        self.weights.bytes() + self.bias().map_or(0, size_of_val)
    }

    /// `out = then(X W + b)` for `x [rows, inputs]` and `out [rows, outputs]`, compact.
    ///
    /// # Errors
    /// [`Error::Length`] if a slice does not fit, [`Error::LevelUnavailable`].
    pub fn forward(&self, x: &[f32], then: Then<'_>, run: Run, out: &mut [f32]) -> Result<(), Error> {
        project(run, None, [self.job(x, then, out)])
    }

    pub(crate) fn job<'a>(&'a self, x: &'a [f32], then: Then<'a>, out: &'a mut [f32]) -> Projection<'a> {
        Projection { x, weights: &self.weights, bias: self.bias(), then, out }
    }
}

/// Reading a weight costs as much as about this many multiply-adds.
const READ: usize = 8;

/// Computes some projections side by side, in the given scratch or the threads' own.
pub(crate) fn project<const N: usize>(
    run: Run,
    scratch: Option<&Scratches>,
    projections: [Projection<'_>; N],
) -> Result<(), Error> {
    let level = resolve_level(run.level)?;
    let work = projections.iter().map(|p| p.weights.inputs() * (p.out.len() + READ * p.weights.outputs()));
    let threads = plan::threads_for(run.threads, work.fold(0, usize::saturating_add));
    let projections = Projections::new(projections, threads)?;
    plan::share(threads, scratch, |scratch| projections.run_next(level, scratch))
}
