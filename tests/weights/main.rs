//! Weights from safetensors files: every naming scheme gives the same layer, whatever is wrong is named, and
//! no file does harm.

mod hostile;
mod relative;
mod schemes;

use safetensors::Dtype;
use safetensors::tensor::TensorView;

/// A safetensors file in the making: names, shapes, numbers.
#[derive(Clone, Default)]
struct File(Vec<(String, Vec<usize>, Vec<f32>)>);

impl File {
    /// Puts a tensor in, or another one in its place.
    fn with(mut self, name: &str, shape: &[usize], data: &[f32]) -> Self {
        self.0.retain(|tensor| tensor.0 != name);
        self.0.push((name.to_string(), shape.to_vec(), data.to_vec()));
        self
    }

    fn without(mut self, name: &str) -> Self {
        self.0.retain(|tensor| tensor.0 != name);
        self
    }

    /// The file, its numbers as F32.
    fn bytes(&self) -> Vec<u8> {
        self.of_type(Dtype::F32, |x| x.to_le_bytes().to_vec())
    }

    fn of_type(&self, dtype: Dtype, to_bytes: impl Fn(f32) -> Vec<u8>) -> Vec<u8> {
        let data: Vec<Vec<u8>> =
            self.0.iter().map(|(_, _, data)| data.iter().flat_map(|&x| to_bytes(x)).collect()).collect();
        let views = self.0.iter().zip(&data).map(|((name, shape, _), data)| {
            (name, TensorView::new(dtype, shape.clone(), data).expect("the bytes fit the shape"))
        });
        safetensors::serialize(views, None).expect("a valid file")
    }
}

/// Numbers in [-1, 1), others for other seeds, exact in bf16 and f16.
fn numbers(seed: u32, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as f32 / 128.0 - 1.0
    };
    std::iter::repeat_with(next).take(len).collect()
}
