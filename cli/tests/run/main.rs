//! `headwise run` from the outside: what it computes, and that whatever is wrong with its input is told in
//! one line, with exit status 2 and no output file.

mod computed;
mod refused;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use safetensors::Dtype;
use safetensors::tensor::TensorView;

/// A safetensors file in the making.
#[derive(Clone)]
struct File {
    tensors: Vec<(&'static str, Dtype, Vec<usize>, Vec<u8>)>,
    metadata: Option<&'static str>,
}

impl File {
    /// `q`, `k` and `v` of 2 x 4/2 x 5 x 7 x 8/6, other numbers everywhere.
    fn small() -> Self {
        let file = Self { tensors: Vec::new(), metadata: None };
        file.random("q", &[2, 4, 5, 8]).random("k", &[2, 2, 7, 8]).random("v", &[2, 2, 7, 6])
    }

    /// Puts a tensor in, or another one in its place.
    fn with(mut self, name: &'static str, dtype: Dtype, shape: &[usize], data: Vec<u8>) -> Self {
        self.tensors.retain(|tensor| tensor.0 != name);
        self.tensors.push((name, dtype, shape.to_vec(), data));
        self
    }

    fn without(mut self, name: &str) -> Self {
        self.tensors.retain(|tensor| tensor.0 != name);
        self
    }

    fn f32s(self, name: &'static str, shape: &[usize], data: &[f32]) -> Self {
        let bytes = data.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.with(name, Dtype::F32, shape, bytes)
    }

    fn i32s(self, name: &'static str, data: &[i32]) -> Self {
        let bytes = data.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.with(name, Dtype::I32, &[data.len()], bytes)
    }

    fn i64s(self, name: &'static str, data: &[i64]) -> Self {
        let bytes = data.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.with(name, Dtype::I64, &[data.len()], bytes)
    }

    fn zeros(self, name: &'static str, dtype: Dtype, shape: &[usize]) -> Self {
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        self.with(name, dtype, shape, vec![0; bytes])
    }

    fn random(self, name: &'static str, shape: &[usize]) -> Self {
        let mut state = name.bytes().fold(1u32, |x, byte| x.wrapping_mul(31).wrapping_add(byte.into()));
        let numbers = std::iter::repeat_with(|| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        });
        let data: Vec<f32> = numbers.take(shape.iter().product()).collect();
        self.f32s(name, shape, &data)
    }

    /// Rounds some F32 tensors to F16 or BF16.
    fn halved(mut self, dtype: Dtype, names: &[&str]) -> Self {
        for (_, of, _, data) in self.tensors.iter_mut().filter(|tensor| names.contains(&tensor.0)) {
            let number = |bytes: &[u8; 4]| {
                let x = f32::from_le_bytes(*bytes);
                match dtype {
                    Dtype::F16 => half::f16::from_f32(x).to_le_bytes(),
                    _ => half::bf16::from_f32(x).to_le_bytes(),
                }
            };
            *data = data.as_chunks().0.iter().flat_map(number).collect();
            *of = dtype;
        }
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let views = self.tensors.iter().map(|(name, dtype, shape, data)| {
            (*name, TensorView::new(*dtype, shape.clone(), data).expect("the bytes fit the shape"))
        });
        let metadata = self.metadata.map(|options| [("options".to_string(), options.to_string())].into());
        safetensors::serialize(views, metadata).expect("a valid file")
    }
}

/// An empty folder for a test.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    _ = fs::remove_dir_all(&path); // what an earlier run has left
    fs::create_dir_all(&path).expect("a folder for the test");
    path
}

fn headwise(arguments: &[&Path]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_headwise")).args(arguments).output().expect("the command starts")
}

/// Runs in `folder` on a file of these bytes; with options in a file of their own.
fn run_bytes(folder: &Path, bytes: &[u8], options: Option<&str>) -> Output {
    let [input, output, json] = ["in.safetensors", "out.safetensors", "options.json"].map(|n| folder.join(n));
    fs::write(&input, bytes).expect("the input is written");
    let mut arguments: Vec<&Path> = ["run", "--input"].map(Path::new).to_vec();
    arguments.extend([&*input, Path::new("--output"), &*output]);
    if let Some(options) = options {
        fs::write(&json, options).expect("the options are written");
        arguments.extend([Path::new("--options"), &*json]);
    }
    headwise(&arguments)
}
