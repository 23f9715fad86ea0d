//! The tensors of a run: out of a safetensors file into vectors of numbers, and back.
//!
//! The data in a file may lie at any address, so numbers are put together from their bytes.

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::run::RunError;

/// A tensor: its shape and its elements, row by row.
#[derive(Debug)]
pub(crate) struct Tensor<T> {
    pub shape: Vec<usize>,
    pub data: Vec<T>,
}

/// All that a file may hold, except `expected`, which a run ignores.
#[derive(Debug)]
pub(crate) struct Inputs {
    pub q: Tensor<f32>,
    pub k: Tensor<f32>,
    pub v: Tensor<f32>,
    pub mask: Option<Tensor<bool>>,
    pub bias: Option<Tensor<f32>>,
    pub slopes: Option<Vec<f32>>,
    pub sinks: Option<Vec<f32>>,
    pub gates: Option<Vec<f32>>,
    pub kv_lens: Option<Vec<usize>>,
    pub q_lens: Option<Vec<usize>>,
    pub offsets: Option<Vec<i64>>,
}

const NAMES: [&str; 12] =
    ["q", "k", "v", "mask", "bias", "slopes", "sinks", "gates", "kv_lens", "q_lens", "offsets", "expected"];

impl Inputs {
    pub fn read(file: &SafeTensors<'_>) -> Result<Self, RunError> {
        let mut names = file.names();
        names.sort_unstable(); // the same complaint every time
        if let Some(name) = names.into_iter().find(|name| !NAMES.contains(name)) {
            return Err(RunError::UnknownTensor(name.to_string()));
        }
        let file = Reader(file);
        let q = file.main("q")?;
        Ok(Self {
            q,
            k: file.main("k")?,
            v: file.main("v")?,
            mask: file.broadcast("mask", bools)?,
            bias: file.broadcast("bias", floats)?,
            slopes: file.vector("slopes", floats)?,
            sinks: file.vector("sinks", floats)?,
            gates: file.vector("gates", floats)?,
            kv_lens: file.lengths("kv_lens")?,
            q_lens: file.lengths("q_lens")?,
            offsets: file.vector("offsets", integers)?,
        })
    }
}

struct Reader<'a>(&'a SafeTensors<'a>);

/// Turns the bytes of a tensor into elements; the name is for the complaint.
type Convert<T> = fn(&str, &TensorView<'_>) -> Result<Vec<T>, RunError>;

impl Reader<'_> {
    /// A tensor if the file has it; its number of axes must be in `ranks`.
    fn get<T>(
        &self,
        name: &str,
        ranks: std::ops::RangeInclusive<usize>,
        convert: Convert<T>,
    ) -> Result<Option<Tensor<T>>, RunError> {
        let Ok(view) = self.0.tensor(name) else { return Ok(None) };
        let shape = view.shape().to_vec();
        if !ranks.contains(&shape.len()) {
            let ranks = match (*ranks.start(), *ranks.end()) {
                (low, high) if low == high => low.to_string(),
                (low, high) => format!("{low} to {high}"),
            };
            return Err(RunError::Rank { name: name.to_string(), shape, ranks });
        }
        let data = convert(name, &view)?;
        Ok(Some(Tensor { shape, data }))
    }

    /// `q`, `k` or `v`.
    fn main(&self, name: &'static str) -> Result<Tensor<f32>, RunError> {
        self.get(name, 4..=4, floats)?.ok_or(RunError::MissingTensor(name))
    }

    fn broadcast<T>(&self, name: &str, convert: Convert<T>) -> Result<Option<Tensor<T>>, RunError> {
        self.get(name, 1..=4, convert)
    }

    fn vector<T>(&self, name: &str, convert: Convert<T>) -> Result<Option<Vec<T>>, RunError> {
        Ok(self.get(name, 1..=1, convert)?.map(|tensor| tensor.data))
    }

    fn lengths(&self, name: &str) -> Result<Option<Vec<usize>>, RunError> {
        let length = |(index, value): (usize, i64)| {
            usize::try_from(value).map_err(|_| RunError::Negative { name: name.to_string(), index, value })
        };
        let lengths = self.vector(name, integers)?;
        lengths.map(|lengths| lengths.into_iter().enumerate().map(length).collect()).transpose()
    }
}

fn floats(name: &str, view: &TensorView<'_>) -> Result<Vec<f32>, RunError> {
    match view.dtype() {
        Dtype::F32 => Ok(numbers(view, f32::from_le_bytes)),
        got @ (Dtype::F16 | Dtype::BF16) => Err(RunError::Unsupported(format!("{name} of type {got:?}"))),
        got => Err(RunError::Type { name: name.to_string(), got, must: "F32" }),
    }
}

fn integers(name: &str, view: &TensorView<'_>) -> Result<Vec<i64>, RunError> {
    match view.dtype() {
        Dtype::I32 => Ok(numbers(view, |bytes| i64::from(i32::from_le_bytes(bytes)))),
        Dtype::I64 => Ok(numbers(view, i64::from_le_bytes)),
        got => Err(RunError::Type { name: name.to_string(), got, must: "I32 or I64" }),
    }
}

fn bools(name: &str, view: &TensorView<'_>) -> Result<Vec<bool>, RunError> {
    match view.dtype() {
        Dtype::BOOL | Dtype::U8 => Ok(view.data().iter().map(|&byte| byte != 0).collect()),
        got => Err(RunError::Type { name: name.to_string(), got, must: "BOOL or U8" }),
    }
}

fn numbers<T, const N: usize>(view: &TensorView<'_>, from_le_bytes: impl Fn([u8; N]) -> T) -> Vec<T> {
    view.data().as_chunks().0.iter().map(|&bytes| from_le_bytes(bytes)).collect()
}

/// A safetensors file with the given F32 tensors.
pub(crate) fn write(tensors: &[(&str, Tensor<f32>)]) -> Result<Vec<u8>, RunError> {
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, tensor)| tensor.data.iter().flat_map(|x| x.to_le_bytes()).collect())
        .collect();
    let views: Vec<(&str, TensorView<'_>)> = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, tensor), bytes)| Ok((*name, TensorView::new(Dtype::F32, tensor.shape.clone(), bytes)?)))
        .collect::<Result<_, RunError>>()?;
    Ok(safetensors::serialize(views, None)?)
}
