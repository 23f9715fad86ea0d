//! The tensors of a run: out of a safetensors file into vectors of numbers, and back.
//!
//! The data in a file may lie at any address, so numbers are put together from their bytes.

use half::{bf16, f16};
use headwise::Element;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::run::RunError;

/// A tensor: its shape and its elements, row by row.
#[derive(Debug)]
pub(crate) struct Tensor<V> {
    pub shape: Vec<usize>,
    pub data: V,
}

/// Elements of any type that Q may have.
#[derive(Debug)]
pub(crate) enum Floats {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Floats {
    fn dtype(&self) -> Dtype {
        match self {
            Floats::F32(_) => Dtype::F32,
            Floats::F16(_) => Dtype::F16,
            Floats::Bf16(_) => Dtype::BF16,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        match self {
            Floats::F32(data) => data.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Floats::F16(data) => data.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Floats::Bf16(data) => data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    }
}

/// A type that Q, K and V may have.
pub(crate) trait Float: Element {
    fn wrap(data: Vec<Self>) -> Floats;
    /// The elements, if they are of this type.
    fn of(floats: &Floats) -> Option<&[Self]>;
}

impl Float for f32 {
    fn wrap(data: Vec<f32>) -> Floats {
        Floats::F32(data)
    }
    fn of(floats: &Floats) -> Option<&[f32]> {
        if let Floats::F32(data) = floats { Some(data) } else { None }
    }
}

impl Float for f16 {
    fn wrap(data: Vec<f16>) -> Floats {
        Floats::F16(data)
    }
    fn of(floats: &Floats) -> Option<&[f16]> {
        if let Floats::F16(data) = floats { Some(data) } else { None }
    }
}

impl Float for bf16 {
    fn wrap(data: Vec<bf16>) -> Floats {
        Floats::Bf16(data)
    }
    fn of(floats: &Floats) -> Option<&[bf16]> {
        if let Floats::Bf16(data) = floats { Some(data) } else { None }
    }
}

/// All that a file may hold, except `expected`, which a run ignores.
#[derive(Debug)]
pub(crate) struct Inputs {
    pub q: Tensor<Floats>,
    pub k: Tensor<Floats>,
    pub v: Tensor<Floats>,
    pub mask: Option<Tensor<Vec<bool>>>,
    pub bias: Option<Tensor<Vec<f32>>>,
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
        let [q, k, v] = ["q", "k", "v"].map(|name| file.main(name));
        let (q, k, v) = (q?, k?, v?);
        for (name, tensor) in [("k", &k), ("v", &v)] {
            let got = tensor.data.dtype();
            if got != q.data.dtype() {
                return Err(RunError::Type { name: name.to_string(), got, must: "of the type of q" });
            }
        }
        Ok(Self {
            mask: file.broadcast("mask", bools)?,
            bias: file.bias(q.data.dtype())?,
            q,
            k,
            v,
            slopes: file.vector("slopes", singles)?,
            sinks: file.vector("sinks", singles)?,
            gates: file.vector("gates", singles)?,
            kv_lens: file.lengths("kv_lens")?,
            q_lens: file.lengths("q_lens")?,
            offsets: file.vector("offsets", integers)?,
        })
    }
}

struct Reader<'a>(&'a SafeTensors<'a>);

/// Turns the bytes of a tensor into elements; the name is for the complaint.
type Convert<V> = fn(&str, &TensorView<'_>) -> Result<V, RunError>;

impl Reader<'_> {
    /// A tensor if the file has it; its number of axes must be in `ranks`.
    fn get<V>(
        &self,
        name: &str,
        ranks: std::ops::RangeInclusive<usize>,
        convert: Convert<V>,
    ) -> Result<Option<Tensor<V>>, RunError> {
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
    fn main(&self, name: &'static str) -> Result<Tensor<Floats>, RunError> {
        self.get(name, 4..=4, floats)?.ok_or(RunError::MissingTensor(name))
    }

    fn broadcast<V>(&self, name: &str, convert: Convert<V>) -> Result<Option<Tensor<V>>, RunError> {
        self.get(name, 1..=4, convert)
    }

    /// `bias`: F32 or the type of `q`, widened, which is exact.
    fn bias(&self, of_q: Dtype) -> Result<Option<Tensor<Vec<f32>>>, RunError> {
        let Some(bias) = self.broadcast("bias", floats)? else { return Ok(None) };
        let data = match bias.data {
            Floats::F32(data) => data,
            data if data.dtype() != of_q => {
                let (name, got) = ("bias".to_string(), data.dtype());
                return Err(RunError::Type { name, got, must: "F32 or of the type of q" });
            }
            Floats::F16(data) => data.into_iter().map(f32::from).collect(),
            Floats::Bf16(data) => data.into_iter().map(f32::from).collect(),
        };
        Ok(Some(Tensor { shape: bias.shape, data }))
    }

    fn vector<V>(&self, name: &str, convert: Convert<V>) -> Result<Option<V>, RunError> {
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

fn floats(name: &str, view: &TensorView<'_>) -> Result<Floats, RunError> {
    match view.dtype() {
        Dtype::F32 => Ok(Floats::F32(numbers(view, f32::from_le_bytes))),
        Dtype::F16 => Ok(Floats::F16(numbers(view, f16::from_le_bytes))),
        Dtype::BF16 => Ok(Floats::Bf16(numbers(view, bf16::from_le_bytes))),
        got => Err(RunError::Type { name: name.to_string(), got, must: "F32, F16 or BF16" }),
    }
}

fn singles(name: &str, view: &TensorView<'_>) -> Result<Vec<f32>, RunError> {
    match view.dtype() {
        Dtype::F32 => Ok(numbers(view, f32::from_le_bytes)),
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

/// A safetensors file with the given tensors.
pub(crate) fn write(tensors: &[(&str, Tensor<Floats>)]) -> Result<Vec<u8>, RunError> {
    let bytes: Vec<Vec<u8>> = tensors.iter().map(|(_, tensor)| tensor.data.bytes()).collect();
    let views: Vec<(&str, TensorView<'_>)> = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, tensor), bytes)| {
            Ok((*name, TensorView::new(tensor.data.dtype(), tensor.shape.clone(), bytes)?))
        })
        .collect::<Result<_, RunError>>()?;
    Ok(safetensors::serialize(views, None)?)
}
