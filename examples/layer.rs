//! A layer from a safetensors file, its projections named as in Llama and its relatives: 8 query heads on 2,
//! with rotary positions, over two sequences of different lengths without padding. The file is a small one
//! that the example writes first.
//!
//! `cargo run --release --example layer`

use std::error::Error;
use std::path::Path;

use headwise::Attention;
use headwise::layer::{Checkpoint, LayerOptions, Pairing, Rotary, Tokens, Workspace};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

const WIDTH: usize = 64;
const HEADS: usize = 8;
const KV_HEADS: usize = 2;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::temp_dir().join(format!("headwise-layer-{}.safetensors", std::process::id()));
    write(&path)?;
    let file = std::fs::read(&path)?; // or mapped memory: nothing is copied but what is packed
    std::fs::remove_file(&path)?;

    let checkpoint = Checkpoint::new([&file[..]])?;
    let options = LayerOptions { kv_heads: KV_HEADS, ..LayerOptions::new(HEADS) };
    let layer = checkpoint.multi_head("model.layers.0.self_attn", options)?;
    let layer = layer.with_rotary(Rotary::new(WIDTH / HEADS, Pairing::Halves, 10_000.0)?)?;
    println!("{} parameters, {:?}", layer.parameters(), layer.config());

    let x: Vec<f32> = (0..5 * WIDTH).map(|i| (i as f32 * 0.3).cos()).collect();
    let (mut both, mut second) = (vec![0.0; 5 * WIDTH], vec![0.0; 3 * WIDTH]);
    let (causal, mut workspace) = (Attention::new().causal(), Workspace::new());
    layer.forward(Tokens::ragged(&x, &[0, 2, 5])?, &causal, &mut workspace, &mut both)?; // 2 and 3 tokens
    layer.forward(Tokens::even(&x[2 * WIDTH..], 1, 3), &causal, &mut workspace, &mut second)?;
    assert_eq!(both[2 * WIDTH..], second); // the sequences know nothing of each other
    assert!(both.iter().all(|y| y.is_finite()) && both.iter().any(|&y| y != 0.0));
    Ok(())
}

/// Writes the four projections, `[out, in]`, as a model's file has them.
fn write(path: &Path) -> Result<(), safetensors::SafeTensorError> {
    let d = WIDTH / HEADS;
    let shapes = [
        ("q_proj", [HEADS * d, WIDTH]),
        ("k_proj", [KV_HEADS * d, WIDTH]),
        ("v_proj", [KV_HEADS * d, WIDTH]),
        ("o_proj", [WIDTH, HEADS * d]),
    ];
    let bytes = shapes.map(|(_, [outputs, inputs])| -> Vec<u8> {
        (0..outputs * inputs).flat_map(|i| ((i as f32 * 0.9).sin() / 8.0).to_le_bytes()).collect()
    });
    let mut tensors = Vec::new();
    for ((name, shape), bytes) in shapes.into_iter().zip(&bytes) {
        let view = TensorView::new(Dtype::F32, shape.to_vec(), bytes)?;
        tensors.push((format!("model.layers.0.self_attn.{name}.weight"), view));
    }
    safetensors::serialize_to_file(tensors, None, path)
}
