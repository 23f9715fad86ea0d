//! The published test cases of the ONNX `Attention` operator, at every level and by the reference.
//!
//! Each file of `tests/data/onnx` holds one node: its inputs, its expected outputs (`out.*`), and in the
//! metadata its attributes and tolerances.

mod adapter;

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use adapter::{By, Node, Tensor};
use headwise::Level;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// Published at the time of writing; a case that gets lost should not go unnoticed.
const CASES: usize = 47;

#[test]
fn every_published_case() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/onnx");
    let mut paths: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert_eq!(paths.len(), CASES);
    let by = || Level::available().map(By::Level).chain([By::Reference]);
    let wrong: Vec<String> =
        paths.iter().flat_map(|path| by().filter_map(|by| check(path, by).err())).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn check(path: &Path, by: By) -> Result<(), String> {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().clone().unwrap();
    let got = node(&file, &metadata).run(by);
    for name in file.names() {
        let Some(output) = name.strip_prefix("out.") else { continue };
        let got = match output {
            "y" => &got.y,
            "present_key" => &got.present_key,
            "present_value" => &got.present_value,
            "qk_matmul" => &got.qk_matmul,
            _ => panic!("{name}"),
        };
        let want = floats(&file.tensor(name).unwrap());
        compare(got, &want, tolerances(&file, &metadata))
            .map_err(|what| format!("{}: {by:?}: {name} {what}", path.file_stem().unwrap().display()))?;
    }
    Ok(())
}

/// Relative and absolute. The published numbers of the half types were rounded at each of several steps.
fn tolerances(file: &SafeTensors<'_>, metadata: &HashMap<String, String>) -> [f32; 2] {
    let [relative, absolute] = ["rtol", "atol"].map(|name| metadata[name].parse::<f32>().unwrap());
    match file.tensor("q").unwrap().dtype() {
        Dtype::F32 => [relative, absolute],
        Dtype::F16 => [relative.max(2.0 / 1024.0), absolute],
        Dtype::BF16 => [relative.max(2.0 / 128.0), absolute],
        dtype => panic!("{dtype:?}"),
    }
}

fn compare(got: &Tensor<f32>, want: &Tensor<f32>, [relative, absolute]: [f32; 2]) -> Result<(), String> {
    if got.shape != want.shape {
        return Err(format!("has shape {:?}, not {:?}", got.shape, want.shape));
    }
    let near = |got: f32, want: f32| got == want || (got - want).abs() <= absolute + relative * want.abs();
    match got.data.iter().zip(&want.data).position(|(&got, &want)| !near(got, want)) {
        Some(at) => Err(format!("[{at}] is {:e}, not {:e}", got.data[at], want.data[at])),
        None => Ok(()),
    }
}

fn node(file: &SafeTensors<'_>, metadata: &HashMap<String, String>) -> Node {
    let attributes: HashMap<String, Value> = serde_json::from_str(&metadata["attributes"]).unwrap();
    let mut node = Node::default();
    for (name, value) in &attributes {
        let size = value.as_i64().and_then(|n| usize::try_from(n).ok()); // -1 is none
        match name.as_str() {
            "q_num_heads" => node.q_num_heads = size,
            "kv_num_heads" => node.kv_num_heads = size,
            "left_window_size" => node.left_window_size = size,
            "right_window_size" => node.right_window_size = size,
            "is_causal" => node.is_causal = size == Some(1),
            "scale" => node.scale = value.as_f64().map(|x| x as f32),
            "softcap" => node.softcap = value.as_f64().map(|x| x as f32).filter(|&x| x != 0.0),
            "qk_matmul_output_mode" => node.qk_matmul_output_mode = value.as_u64().unwrap(),
            "softmax_precision" => {} // f32 always
            _ => panic!("{name}"),
        }
    }
    for name in file.names() {
        let tensor = file.tensor(name).unwrap();
        match name {
            "q" => node.q = Some(floats(&tensor)),
            "k" => node.k = Some(floats(&tensor)),
            "v" => node.v = Some(floats(&tensor)),
            "past_key" => node.past_key = Some(floats(&tensor)),
            "past_value" => node.past_value = Some(floats(&tensor)),
            "attn_mask" if tensor.dtype() == Dtype::BOOL => {
                let data = tensor.data().iter().map(|&x| x != 0).collect();
                node.mask = Some(Tensor { shape: tensor.shape().to_vec(), data });
            }
            "attn_mask" => node.bias = Some(floats(&tensor)),
            "nonpad_kv_seqlen" => {
                let (lens, rest) = tensor.data().as_chunks();
                assert!(tensor.dtype() == Dtype::I64 && rest.is_empty());
                node.nonpad_kv_seqlen = Some(lens.iter().map(|&x| i64::from_le_bytes(x) as usize).collect());
            }
            name => assert!(name.starts_with("out."), "{name}"),
        }
    }
    node
}

/// The numbers of a tensor of any float type, as f32.
fn floats(tensor: &TensorView<'_>) -> Tensor<f32> {
    let data = tensor.data();
    let halves = || data.as_chunks().0.iter().map(|&x| u16::from_le_bytes(x));
    let data = match tensor.dtype() {
        Dtype::F32 => data.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect(),
        Dtype::BF16 => halves().map(|x| f32::from_bits((x as u32) << 16)).collect(),
        Dtype::F16 => halves().map(from_f16).collect(),
        dtype => panic!("{dtype:?}"),
    };
    Tensor { shape: tensor.shape().to_vec(), data }
}

fn from_f16(bits: u16) -> f32 {
    let (exponent, fraction) = ((bits >> 10) as i32 & 31, (bits & 1023) as f32);
    let size = match (exponent, fraction) {
        (0, _) => fraction * 2f32.powi(-24),
        (31, 0.0) => f32::INFINITY,
        (31, _) => f32::NAN,
        _ => (1024.0 + fraction) * 2f32.powi(exponent - 25),
    };
    if bits >> 15 == 1 { -size } else { size }
}
