//! Rotary positions: the ONNX operator suite's RotaryEmbedding cases, and what must hold for any.

use std::f64::consts::TAU;
use std::fs;
use std::path::Path;

use headwise::Error;
use headwise::layer::{Pairing, Rotary, RotaryScaling};
use headwise_kernels::rotate;
use safetensors::SafeTensors;

use crate::*;

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let (chunks, _) = file.tensor(name).unwrap().data().as_chunks::<4>();
    chunks.iter().map(|x| f32::from_le_bytes(*x)).collect()
}

/// ONNX gives the cosines and sines of the positions as tensors.
#[test]
fn every_published_case() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/rotary");
    let paths: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(paths.len(), 4);
    for path in paths {
        let bytes = fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let attributes: serde_json::Value =
            serde_json::from_str(&header.metadata().as_ref().unwrap()["attributes"]).unwrap();
        let pairing = match attributes["interleaved"].as_i64() {
            Some(1) => Pairing::Interleaved,
            _ => Pairing::Halves,
        };
        let [b, h, l, d] = file.tensor("x").unwrap().shape().try_into().unwrap();
        let half = *file.tensor("cos_cache").unwrap().shape().last().unwrap();
        let (cos, sin) = (floats(&file, "cos_cache"), floats(&file, "sin_cache"));
        let positions: Vec<usize> = match file.tensor("position_ids") {
            Ok(ids) => {
                let (chunks, _) = ids.data().as_chunks::<8>();
                chunks.iter().map(|x| i64::from_le_bytes(*x) as usize).collect()
            }
            Err(_) => (0..b * l).collect(), // one row of cosines for each token
        };
        let want: Vec<f64> = floats(&file, "out.y").iter().map(|&x| x as f64).collect();
        for level in levels() {
            let mut x = floats(&file, "x");
            for (row, head) in x.chunks_exact_mut(d).enumerate() {
                let at = positions[row / (h * l) * l + row % l] * half;
                rotate(level, pairing, [&cos[at..][..half], &sin[at..][..half]], head, d).unwrap();
            }
            near(&x, &want, 1e-6, format!("{level}, {}", path.display()));
        }
    }
}

/// pie-project/pie #603: partial rotary used the full head width for frequencies and pairs.
#[test]
fn a_part_of_the_head_turns_by_itself() {
    let rotary = Rotary::new(4, Pairing::Halves, 10_000.0).unwrap();
    let start: Vec<f32> = (1..=8).map(|i| i as f32).collect();
    let want =
        [-1.413352520780047, 1.8791180666879925, -2.828857481741469, 4.058191135400942, 5.0, 6.0, 7.0, 8.0];
    let mut x = start.clone();
    rotary.rotate(&mut x, 8, 3).unwrap();
    near(&x, &want, 1e-6, "position 3");
    let mut x = start.clone();
    rotary.rotate(&mut x, 8, 0).unwrap();
    assert_eq!(x, start);
    assert!(matches!(
        Rotary::new(3, Pairing::Halves, 1e4),
        Err(Error::Value { argument: "rotary width", .. })
    ));
    assert!(rotary.rotate(&mut [0.0; 2], 2, 0).is_err());
    assert!(rotary.rotate(&mut [0.0; 9], 8, 0).is_err());
    for base in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(Rotary::new(4, Pairing::Halves, base).is_err(), "{base}");
    }
    let config = MultiHeadConfig::new(8, 4);
    assert!(layer(config, [false; 4]).with_rotary(rotary).is_err());
}

/// Scores know of distances only, and lengths stay: near and far, inside the table and beyond.
#[test]
fn only_distances_count() {
    for pairing in [Pairing::Halves, Pairing::Interleaved] {
        let rotary = Rotary::new(32, pairing, 10_000.0).unwrap();
        let turned = |x: &[f32], position| {
            let mut x = x.to_vec();
            rotary.rotate(&mut x, 32, position).unwrap();
            x
        };
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| *a as f64 * *b as f64).sum::<f64>();
        let (q, k) = (noise(1, 32), noise(2, 32));
        for distance in [0, 1, 5, 300] {
            let want = dot(&turned(&q, distance), &k);
            for first in [1, 77, 2047, 2048, 100_000] {
                let got = dot(&turned(&q, first + distance), &turned(&k, first));
                assert!((got - want).abs() < 2e-6, "{pairing:?}, {distance} from {first}: {got}, not {want}");
            }
        }
    }
}

#[test]
fn frequencies_are_scaled() {
    let of =
        |scaling| Rotary::scaled(128, Pairing::Halves, 500_000.0, scaling).unwrap().frequencies().to_vec();
    let plain = of(RotaryScaling::None);
    assert_eq!((plain.len(), plain[0]), (64, 1.0));
    let linear = of(RotaryScaling::Linear { factor: 4.0 });
    assert!(linear.iter().zip(&plain).all(|(x, p)| (x * 4.0 - p).abs() < 1e-15));
    let ntk = of(RotaryScaling::Ntk { factor: 4.0 });
    assert_eq!(ntk[0], 1.0);
    assert!((ntk[63] * 4.0 / plain[63] - 1.0).abs() < 1e-12);
    // Llama 3.1: wave lengths below 8192 / 4 stay, above 8192 / 1 are 8 times as long, between grow evenly.
    let (factor, low, high, original) = (8.0, 1.0, 4.0, 8192.0);
    let llama = of(RotaryScaling::Llama3 { factor, low, high, original });
    let mut kinds = [0; 3];
    for (x, p) in llama.iter().zip(&plain) {
        let length = TAU / p;
        let smooth = (original / length - low) / (high - low);
        let (kind, want) = match length {
            length if length < original / high => (0, *p),
            length if length > original / low => (1, p / factor),
            _ => (2, (1.0 - smooth) * p / factor + smooth * p),
        };
        kinds[kind] += 1;
        assert!((x / want - 1.0).abs() < 1e-12, "{x}, not {want}");
    }
    assert!(kinds.iter().all(|&n| n > 3), "{kinds:?}");
    let bad = RotaryScaling::Llama3 { factor, low, high: low, original };
    assert!(Rotary::scaled(4, Pairing::Halves, 1e4, bad).is_err());
    assert!(Rotary::scaled(4, Pairing::Halves, 1e4, RotaryScaling::Linear { factor: 0.0 }).is_err());
}
