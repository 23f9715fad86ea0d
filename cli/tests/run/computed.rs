//! What a good run computes: the reference's numbers, in any layout, on any threads; a layer of a real model.

use std::fs;

use safetensors::{Dtype, SafeTensors};

use crate::{File, folder, run_bytes};

/// Runs and reads an F32 tensor of the output: shape and data.
fn tensor(file: &[u8], name: &str) -> (Vec<usize>, Vec<f32>) {
    let file = SafeTensors::deserialize(file).expect("the output is a safetensors file");
    let tensor = file.tensor(name).unwrap_or_else(|_| panic!("the output has no {name}"));
    assert_eq!(tensor.dtype(), Dtype::F32);
    let numbers = tensor.data().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
    (tensor.shape().to_vec(), numbers.collect())
}

fn compute(file: &File, options: &str) -> Vec<u8> {
    headwise_cli::run::compute(&file.bytes(), Some(options))
        .unwrap_or_else(|error| panic!("{options}: {error}"))
}

fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let difference = |(a, b): (&f32, &f32)| if a == b { 0.0 } else { (a - b).abs() };
    a.iter().zip(b).map(difference).fold(0.0, |max, x| if x <= max { max } else { x })
}

#[test]
fn a_run_prints_one_line_and_replaces_the_output() {
    let folder = folder("good");
    fs::write(folder.join("out.safetensors"), "of an earlier run").expect("written");
    let file =
        File { metadata: Some(r#"{"causal": true, "level": "scalar", "lse": true}"#), ..File::small() };
    let result = run_bytes(&folder, &file.bytes(), None);
    let line = String::from_utf8_lossy(&result.stdout);
    assert!(result.status.success() && result.stderr.is_empty());
    assert_eq!(line.lines().count(), 1);
    assert!(line.contains("scalar-f32") && line.contains("out [2, 4, 5, 6]"), "{line}");
    let output = fs::read(folder.join("out.safetensors")).expect("the output is there");
    assert_eq!(tensor(&output, "lse").0, [2, 4, 5]);
    assert_eq!(fs::read_dir(&folder).expect("the folder is there").count(), 2);

    // The options file wins over the metadata.
    assert!(run_bytes(&folder, &file.bytes(), Some("{}")).status.success());
    let output = fs::read(folder.join("out.safetensors")).expect("the output is there");
    assert_eq!(SafeTensors::deserialize(&output).expect("valid").names(), ["out"]);
}

/// Half a unit in the last place of numbers up to 2, and what f32 adds.
#[test]
fn halves_come_out_as_they_went_in() {
    let bits = |file: &[u8], dtype: Dtype| -> Vec<f32> {
        let file = SafeTensors::deserialize(file).expect("the output is a safetensors file");
        let out = file.tensor("out").expect("the output has out");
        assert_eq!((out.dtype(), out.shape()), (dtype, &[2, 4, 5, 6][..]));
        let number = |&bytes: &[u8; 2]| match dtype {
            Dtype::F16 => half::f16::from_le_bytes(bytes).to_f32(),
            _ => half::bf16::from_le_bytes(bytes).to_f32(),
        };
        out.data().as_chunks().0.iter().map(number).collect()
    };
    for (dtype, limit) in [(Dtype::F16, 2f32.powi(-11) + 2e-5), (Dtype::BF16, 2f32.powi(-8) + 2e-5)] {
        let file = File::small().halved(dtype, &["q", "k", "v"]).random("bias", &[4, 1, 7]);
        for file in [file.clone(), file.halved(dtype, &["bias"])] {
            let expected = bits(&compute(&file, r#"{"reference": true}"#), dtype);
            let levels = headwise::Level::available().map(|level| format!(r#"{{"level": "{level}"}}"#));
            let others = ["{}", r#"{"threads": 2, "precision": "exact"}"#].map(String::from);
            for options in levels.chain(others) {
                let difference = max_difference(&bits(&compute(&file, &options), dtype), &expected);
                assert!(difference <= limit, "{dtype:?}, {options}: {difference:e}");
            }
        }
    }
}

#[test]
fn kernels_agree_with_the_reference() {
    let small = File::small;
    let mut mask = vec![1u8; 35];
    [3, 7, 8, 9, 10, 11, 12, 13, 20].into_iter().for_each(|hidden| mask[hidden] = 0); // query 1 sees nothing
    let hiding = [0.5, f32::NEG_INFINITY, -3.0, 80000.0, 0.0, 1.0, f32::NEG_INFINITY];
    let table: &[(&str, File, &str)] = &[
        ("plain", small(), ""),
        ("scale", small(), r#", "scale": -0.3"#),
        ("softcap", small(), r#", "scale": 4, "softcap": 2.5"#),
        ("causal", small(), r#", "causal": true"#),
        ("top left", small(), r#", "causal": true, "position": "top_left""#),
        ("bottom right", small(), r#", "causal": true, "position": "bottom_right""#),
        ("at -2", small(), r#", "causal": true, "position": -2"#),
        ("window", small(), r#", "window": [2, 1]"#),
        ("window to the left", small(), r#", "window": [1, null]"#),
        ("mask", small().with("mask", Dtype::BOOL, &[5, 7], mask.clone()), ""),
        ("mask of bytes", small().with("mask", Dtype::U8, &[1, 1, 5, 7], mask), ""),
        ("bias", small().random("bias", &[4, 1, 7]), ""),
        ("bias that hides", small().f32s("bias", &[7], &hiding), ""),
        ("slopes", small().f32s("slopes", &[4], &[0.5, 0.25, 0.0, -1.0]), ""),
        ("sinks", small().f32s("sinks", &[4], &[0.0, 3.0, f32::NEG_INFINITY, -2.0]), ""),
        ("gates", small().f32s("gates", &[4], &[1.0, 0.0, -2.0, 0.5]), ""),
        ("offsets", small().i64s("offsets", &[3, -2]), r#", "causal": true, "position": "top_left""#),
        ("lengths", small().i32s("kv_lens", &[3, 0]).i64s("q_lens", &[5, 2]), r#", "causal": true"#),
        ("D = 0", small().random("q", &[2, 4, 5, 0]).random("k", &[2, 2, 7, 0]), r#", "scale": 1"#),
        ("no keys", small().random("k", &[2, 2, 0, 8]).random("v", &[2, 2, 0, 6]), ""),
        ("no queries", small().random("q", &[2, 4, 0, 8]), ""),
    ];
    for (what, file, options) in table {
        let expected =
            compute(file, &format!(r#"{{"reference": true, "lse": true, "stats": true{options}}}"#));
        for kernel in ["", r#", "level": "scalar""#, r#", "threads": 2"#] {
            let got = compute(file, &format!(r#"{{"lse": true, "stats": true{kernel}{options}}}"#));
            for (name, limit) in [("out", 2e-6), ("lse", 2e-6), ("stats", 1e-5), ("received", 1e-5)] {
                let ((shape, got), (expected_shape, expected)) =
                    (tensor(&got, name), tensor(&expected, name));
                assert_eq!(shape, expected_shape, "{what}: {name}");
                let largest =
                    expected.iter().filter(|x| x.is_finite()).fold(1.0, |max: f32, x| max.max(x.abs()));
                let (difference, limit) = (max_difference(&got, &expected), limit * largest);
                assert!(difference <= limit, "{what}: {name} differs by {difference:e}");
            }
        }
    }
}

#[test]
fn layouts_hold_the_same_numbers() {
    let swap = |(shape, data): (Vec<usize>, Vec<f32>)| {
        let [b, x, y, d] = shape[..] else { panic!("four axes") };
        let at = |i: usize| (i / (x * y * d), i / (x * d) % y, i / d % x, i % d);
        let swapped =
            (0..data.len()).map(at).map(|(b, i, j, c)| data[((b * x + j) * y + i) * d + c]).collect();
        (vec![b, y, x, d], swapped)
    };
    let heads_first = File::small();
    let bytes = heads_first.bytes();
    let mut tokens_first = heads_first.clone();
    for name in ["q", "k", "v"] {
        let (shape, data): (_, Vec<f32>) = swap(tensor(&bytes, name));
        tokens_first = tokens_first.f32s(name, &shape, &data);
    }
    for options in [r#""causal": true"#, r#""causal": true, "reference": true"#] {
        let expected = compute(&heads_first, &format!("{{{options}}}"));
        let got = compute(&tokens_first, &format!(r#"{{"layout": "blhd", {options}}}"#));
        assert_eq!(swap(tensor(&got, "out")), tensor(&expected, "out"));
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let file = File { tensors: Vec::new(), metadata: None };
    let file = file.random("q", &[1, 4, 300, 64]).random("k", &[1, 2, 300, 64]).random("v", &[1, 2, 300, 64]);
    let expected = compute(&file, r#"{"threads": 1, "lse": true}"#);
    for threads in [2, 3, 8] {
        assert!(
            compute(&file, &format!(r#"{{"threads": {threads}, "lse": true}}"#)) == expected,
            "{threads} threads"
        );
    }
}

#[test]
fn the_reference_gives_the_scores() {
    let file = File::small();
    let scores = |stage: &str| {
        let options = format!(r#"{{"reference": true, "causal": true, "softcap": 2, "scores": "{stage}"}}"#);
        let (shape, data) = tensor(&compute(&file, &options), "scores");
        assert_eq!(shape, [2, 4, 5, 7]);
        data
    };
    let (scaled, capped, biased, weights) =
        (scores("scaled"), scores("capped"), scores("biased"), scores("weights"));
    assert_eq!(scaled[6], f32::NEG_INFINITY); // query 0 stands at key 2
    assert!((2.0 * (scaled[0] / 2.0).tanh() - capped[0]).abs() < 1e-6);
    assert_eq!(capped, biased);
    assert!(weights[3..7] == [0.0; 4] && (weights[..3].iter().sum::<f32>() - 1.0).abs() < 1e-6);
}

#[test]
fn a_layer_of_minilm_comes_out_as_recorded() {
    let folder = folder("minilm");
    let bytes = include_bytes!("../data/minilm-layer0.safetensors");
    assert!(run_bytes(&folder, bytes, None).status.success());
    let output = fs::read(folder.join("out.safetensors")).expect("the output is there");
    let ((shape, out), (expected_shape, expected)) = (tensor(&output, "out"), tensor(bytes, "expected"));
    assert_eq!(shape, expected_shape);
    let difference = max_difference(&out, &expected);
    assert!(difference <= 2e-6, "differs by {difference:e}");
}
