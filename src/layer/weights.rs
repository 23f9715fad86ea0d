//! Weights out of safetensors files: the bytes of one file, or of all files of a model, checked and read
//! where they lie. Only what a call asks for is turned into numbers.
//!
//! A file is not trusted: its header is checked against its length before anything is read (by `safetensors`:
//! sizes that overflow, tensors that overlap or leave holes, a header that is cut or too long), a tensor has
//! the shape that is asked for or is refused, and no axis is 0, so that no size exceeds the file's own.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

use half::{bf16, f16};
use headwise_kernels::{Error, WeightLayout, Weights};
use safetensors::{Dtype, SafeTensorError, SafeTensors};

use super::linear::Linear;
use super::norm::Norm;

/// The tensors of a model, by name.
///
/// ```
/// use headwise::layer::{Checkpoint, WeightsError};
/// // A header of 2 bytes that says nothing, and no data.
/// let file = b"\x02\0\0\0\0\0\0\0{}";
/// let checkpoint = Checkpoint::new([&file[..]])?;
/// assert_eq!(checkpoint.tensor("wte.weight").unwrap_err().to_string(), "wte.weight is missing");
/// assert!(Checkpoint::new([&file[..9]]).is_err());
/// # Ok::<(), WeightsError>(())
/// ```
#[derive(Debug)]
pub struct Checkpoint<'a> {
    files: Vec<SafeTensors<'a>>,
    /// Of each file.
    metadata: Vec<HashMap<String, String>>,
}

/// Why weights were refused.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum WeightsError {
    /// The bytes are not a safetensors file.
    Format(String),
    /// Two files have a tensor of this name, or two layers to be saved this prefix.
    Twice(String),
    /// No tensors under this prefix are named as one of the [schemes](super::Scheme::ALL) does.
    NoScheme(String),
    /// All tensors that are missing or not as they must be.
    Tensors(Vec<TensorError>),
    /// What the tensors make up is refused.
    Layer(Error),
    /// The metadata that [`save`](super::save) writes is not there or not as it must be.
    Metadata(String),
}

/// A tensor that is not as it must be.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TensorError {
    /// There is none.
    Missing {
        /// Its name.
        name: String,
    },
    /// It has another shape.
    Shape {
        /// Its name.
        name: String,
        /// Its shape.
        got: Vec<usize>,
        /// What it must be.
        must: String,
    },
    /// It has another element type than F32, F16 or BF16.
    Type {
        /// Its name.
        name: String,
        /// Its type.
        got: String,
    },
    /// It changes what the layer computes in a way that [`MultiHead`](super::MultiHead) does not have.
    Unsupported {
        /// Its name.
        name: String,
    },
}

impl fmt::Display for TensorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { name } => write!(f, "{name} is missing"),
            Self::Shape { name, got, must } => write!(f, "{name} has shape {got:?}, must be {must}"),
            Self::Type { name, got } => write!(f, "{name} is {got}, must be F32, F16 or BF16"),
            Self::Unsupported { name } => write!(f, "{name} is not supported"),
        }
    }
}

impl std::error::Error for TensorError {}

/// Faults that a message names; the others are counted.
const NAMED: usize = 6;

impl fmt::Display for WeightsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Format(why) => write!(f, "not a safetensors file: {why}"),
            Self::Twice(name) => write!(f, "{name:?} is there twice"),
            Self::NoScheme(prefix) => write!(f, "no attention weights at {prefix:?}"),
            Self::Tensors(errors) => {
                for (i, error) in errors.iter().take(NAMED).enumerate() {
                    write!(f, "{}{error}", if i == 0 { "" } else { "; " })?;
                }
                match errors.len().saturating_sub(NAMED) {
                    0 => Ok(()),
                    more => write!(f, "; and {more} more"),
                }
            }
            Self::Layer(error) => write!(f, "{error}"),
            Self::Metadata(why) => write!(f, "metadata: {why}"),
        }
    }
}

impl std::error::Error for WeightsError {}

impl From<Error> for WeightsError {
    fn from(error: Error) -> Self {
        Self::Layer(error)
    }
}

impl From<TensorError> for WeightsError {
    fn from(error: TensorError) -> Self {
        Self::Tensors(vec![error])
    }
}

impl<'a> Checkpoint<'a> {
    /// The tensors of all `files`: their bytes, which may be mapped memory.
    ///
    /// # Errors
    /// [`WeightsError::Format`] unless all are safetensors files, [`WeightsError::Twice`] if two have a
    /// tensor of the same name.
    pub fn new(files: impl IntoIterator<Item = &'a [u8]>) -> Result<Self, WeightsError> {
        let (mut all, mut metadata): (Vec<SafeTensors<'a>>, _) = (Vec::new(), Vec::new());
        let refused = |error: SafeTensorError| WeightsError::Format(error.to_string());
        for bytes in files {
            let file = SafeTensors::deserialize(bytes).map_err(refused)?;
            let (_, header) = SafeTensors::read_metadata(bytes).map_err(refused)?;
            metadata.push(header.metadata().clone().unwrap_or_default());
            let mut twice = file.names();
            twice.retain(|name| all.iter().any(|other| other.tensor(name).is_ok()));
            if let Some(name) = twice.into_iter().min() {
                return Err(WeightsError::Twice(name.to_string()));
            }
            all.push(file);
        }
        Ok(Self { files: all, metadata })
    }

    /// The names of all tensors, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().flat_map(SafeTensors::names)
    }

    /// What the files' own metadata say under a key.
    pub fn metadata<'s>(&'s self, key: &'s str) -> impl Iterator<Item = &'s str> {
        self.metadata.iter().filter_map(move |file| file.get(key).map(String::as_str))
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.files.iter().any(|file| file.tensor(name).is_ok())
    }

    /// A tensor of numbers.
    ///
    /// # Errors
    /// [`TensorError::Missing`]; [`TensorError::Type`] unless it is F32, F16 or BF16; [`TensorError::Shape`]
    /// if an axis is 0.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'a>, TensorError> {
        let view = self.files.iter().find_map(|file| file.tensor(name).ok());
        let view = view.ok_or_else(|| TensorError::Missing { name: name.to_string() })?;
        let number = match view.dtype() {
            Dtype::F32 => Number::F32,
            Dtype::F16 => Number::F16,
            Dtype::BF16 => Number::Bf16,
            got => return Err(TensorError::Type { name: name.to_string(), got: format!("{got:?}") }),
        };
        let (shape, data) = (view.shape().to_vec(), view.data());
        if shape.contains(&0) {
            return Err(TensorError::Shape { name: name.to_string(), got: shape, must: "above 0".into() });
        }
        Ok(Tensor { name: name.to_string(), shape, number, data })
    }

    /// The linear map of the tensors `{name}.weight`, in `layout`, and `{name}.bias`, if there is one.
    ///
    /// # Errors
    /// [`WeightsError::Tensors`] with what is missing or not as it must be.
    pub fn linear(
        &self,
        name: &str,
        layout: WeightLayout,
        [inputs, outputs]: [usize; 2],
    ) -> Result<Linear, WeightsError> {
        let shape = match layout {
            WeightLayout::OutIn => [outputs, inputs],
            WeightLayout::InOut => [inputs, outputs],
        };
        let weight = self.tensor(&format!("{name}.weight")).and_then(|tensor| tensor.of_shape(&shape));
        let bias = self.optional(&format!("{name}.bias"), &[outputs]);
        let (weight, bias) = both(weight, bias)?;
        let bias = bias.map(|tensor| tensor.numbers());
        let weights =
            weight.pack(core::slice::from_ref(&(0..inputs * outputs)), layout, [inputs, outputs])?;
        Ok(Linear::with_weights(weights, bias.as_deref())?)
    }

    /// The LayerNorm of the tensors `{name}.weight` and `{name}.bias`, if there is one; in old files `gamma`
    /// and `beta`.
    ///
    /// # Errors
    /// As [`Checkpoint::linear`]; [`WeightsError::Layer`] if `eps` is not a number for a norm.
    pub fn layer_norm(&self, name: &str, features: usize, eps: f32) -> Result<Norm, WeightsError> {
        let old = self.has(&format!("{name}.gamma"));
        let [weight, bias] = if old { ["gamma", "beta"] } else { ["weight", "bias"] };
        let weight = self.tensor(&format!("{name}.{weight}")).and_then(|tensor| tensor.of_shape(&[features]));
        let (weight, bias) = both(weight, self.optional(&format!("{name}.{bias}"), &[features]))?;
        let bias = bias.map(|tensor| tensor.numbers());
        Ok(Norm::layer(&weight.numbers(), bias.as_deref(), eps)?)
    }

    /// The bytes of a tensor of this type.
    pub(super) fn bytes(&self, name: &str, dtype: Dtype) -> Option<&'a [u8]> {
        let view = self.files.iter().find_map(|file| file.tensor(name).ok())?;
        (view.dtype() == dtype).then(|| view.data())
    }

    /// A tensor that need not be there, but has this shape if it is.
    pub(super) fn optional(&self, name: &str, shape: &[usize]) -> Result<Option<Tensor<'a>>, TensorError> {
        if self.has(name) { self.tensor(name)?.of_shape(shape).map(Some) } else { Ok(None) }
    }
}

/// Both, or the errors of both.
fn both<A, B>(a: Result<A, TensorError>, b: Result<B, TensorError>) -> Result<(A, B), WeightsError> {
    match (a, b) {
        (Ok(a), Ok(b)) => Ok((a, b)),
        (a, b) => Err(WeightsError::Tensors(a.err().into_iter().chain(b.err()).collect())),
    }
}

#[derive(Debug, Clone, Copy)]
enum Number {
    F32,
    F16,
    Bf16,
}

/// A tensor of numbers in a file, row-major, no axis 0. It is read when asked to.
#[derive(Debug, Clone)]
pub struct Tensor<'a> {
    name: String,
    shape: Vec<usize>,
    number: Number,
    data: &'a [u8],
}

impl Tensor<'_> {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The tensor, if it has this shape.
    ///
    /// # Errors
    /// [`TensorError::Shape`].
    pub fn of_shape(self, shape: &[usize]) -> Result<Self, TensorError> {
        if self.shape == shape { Ok(self) } else { Err(self.refused(format!("{shape:?}"))) }
    }

    /// All its numbers.
    pub fn numbers(&self) -> Vec<f32> {
        let mut to = Vec::new();
        self.append(0..self.shape.iter().product(), &mut to);
        to
    }

    /// Appends the numbers of row `index`, all axes but the first: whether there is such a row.
    pub fn append_row(&self, index: usize, to: &mut Vec<f32>) -> bool {
        let width: usize = self.shape.iter().skip(1).product();
        let there = self.shape.first().is_some_and(|&rows| index < rows);
        if there {
            self.append(index * width..(index + 1) * width, to);
        }
        there
    }

    /// Appends the elements of `range`, which lies in the tensor.
    pub(super) fn append(&self, range: Range<usize>, to: &mut Vec<f32>) {
        match self.number {
            Number::F32 => extend(to, self.data, range, f32::from_le_bytes),
            Number::F16 => extend(to, self.data, range, |x| f16::from_le_bytes(x).to_f32()),
            Number::Bf16 => extend(to, self.data, range, |x| bf16::from_le_bytes(x).to_f32()),
        }
    }

    /// Packs the elements of these ranges, in their own type.
    pub(super) fn pack(
        &self,
        ranges: &[Range<usize>],
        layout: WeightLayout,
        [inputs, outputs]: [usize; 2],
    ) -> Result<Weights, Error> {
        let data = self.data;
        match self.number {
            Number::F32 => Weights::pack(&collect(data, ranges, f32::from_le_bytes), layout, inputs, outputs),
            Number::F16 => Weights::pack(&collect(data, ranges, f16::from_le_bytes), layout, inputs, outputs),
            Number::Bf16 => {
                Weights::pack(&collect(data, ranges, bf16::from_le_bytes), layout, inputs, outputs)
            }
        }
    }

    pub(super) fn refused(&self, must: String) -> TensorError {
        TensorError::Shape { name: self.name.clone(), got: self.shape.clone(), must }
    }
}

/// Appends elements, put together from their bytes: they may lie at any address.
fn extend<T, const N: usize>(
    to: &mut Vec<T>,
    data: &[u8],
    range: Range<usize>,
    from_le_bytes: impl Fn([u8; N]) -> T,
) {
    to.extend(data.as_chunks().0[range].iter().map(|&bytes| from_le_bytes(bytes)));
}

fn collect<T, const N: usize>(
    data: &[u8],
    ranges: &[Range<usize>],
    from_le_bytes: impl Fn([u8; N]) -> T,
) -> Vec<T> {
    let mut to = Vec::with_capacity(ranges.iter().map(ExactSizeIterator::len).sum());
    ranges.iter().for_each(|range| extend(&mut to, data, range.clone(), &from_le_bytes));
    to
}
