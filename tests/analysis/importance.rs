//! What is lost without a head.

use headwise::importance::Importance;
use headwise::layer::{MultiHeadConfig, Tokens, Workspace};
use headwise::similarity::OutputCosine;
use headwise::{Attention, Error, Run, View};

use crate::common::fill;
use crate::{near, noise_layer};

const STARTS: [usize; 4] = [0, 9, 9, 26];

fn config() -> MultiHeadConfig {
    MultiHeadConfig { kv_heads: 2, d_k: 5, d_v: 7, d_out: 11, ..MultiHeadConfig::new(12, 4) }
}

/// A loss that is not linear in the output.
fn loss(y: &[f32]) -> f64 {
    y.iter().enumerate().map(|(i, &y)| (f64::from(y) - (i as f64).sin()).powi(2)).sum()
}

#[test]
fn one_sweep_is_as_many_passes_with_gates() {
    let (layer, data) = (noise_layer(config(), 3), fill::<f32>(26 * 12, 1));
    let (x, mut workspace, mut y) =
        (Tokens::ragged(&data, &STARTS).unwrap(), Workspace::new(), vec![0.0; 26 * 11]);
    let own = [0.5, 1.5, -1.0, 2.0];
    for (attention, own) in [(Attention::new().causal(), [1.0; 4]), (Attention::new().gates(&own), own)] {
        let sweep = Importance::of_layer(&layer, x, &attention, &mut workspace, loss).unwrap();
        let change = Importance::of_layer_output(&layer, x, &attention, &mut workspace).unwrap();
        layer.forward(x, &attention, &mut workspace, &mut y).unwrap();
        let (whole, mut changes) = (y.clone(), Vec::new());
        let passes = Importance::leave_one_out(4, |gates| {
            let gates: Vec<f32> = gates.iter().zip(own).map(|(gate, own)| gate * own).collect();
            layer.forward(x, &attention.gates(&gates), &mut workspace, &mut y)?;
            let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            let change = norm(&mut y.iter().zip(&whole).map(|(y, whole)| y - whole));
            changes.push(change / norm(&mut whole.iter().copied()));
            Ok::<_, Error>(loss(&y))
        });
        let passes = passes.unwrap();
        for (sweep, passes) in sweep.scores().iter().zip(passes.scores()) {
            near(*sweep, *passes, 1e-4 * loss(&whole), "loss");
        }
        assert_eq!(sweep.ranking(), passes.ranking());
        for (got, want) in change.scores().iter().zip(&changes[1..]) {
            near(*got, *want, 1e-5, "change of the output");
        }
    }
}

/// Near gates of 1 the loss without a head and its gradient by the gate tell the same of a loss that is
/// linear.
#[test]
fn gradients_fill_the_same_scores() {
    let gradients = [1.0, -4.0, 2.0, -3.0, 2.0, 0.0];
    let mut got = Importance::from_gradients(&gradients, 3).unwrap();
    assert_eq!((got.scores(), got.examples()), (&[2.0, 3.0, 1.0][..], 2));
    assert_eq!(got.ranking(), [1, 0, 2]);
    let norm = 14f64.sqrt();
    assert_eq!(got.normalised(), [2.0 / norm, 3.0 / norm, 1.0 / norm]);
    got.add(&Importance::new(vec![8.0, 0.0, 1.0])).unwrap();
    assert_eq!((got.scores(), got.examples()), (&[4.0, 2.0, 1.0][..], 3));
    let wrong = Importance::from_gradients(&gradients, 4);
    assert_eq!(wrong, Err(Error::Length { argument: "gradients", got: 6, expected: 4 }));
    assert!(got.add(&Importance::new(vec![1.0])).is_err());
    let linear =
        |gates: &[f32]| Ok::<_, ()>(gates.iter().zip([3.0, 1.0]).map(|(g, w)| -f64::from(*g) * w).sum());
    let (without, gradient) = (
        Importance::leave_one_out(2, linear).unwrap(),
        Importance::from_gradients(&[-3.0, -1.0], 2).unwrap(),
    );
    assert_eq!(without.scores(), gradient.scores());
    assert_eq!(Importance::new(vec![0.0; 2]).normalised(), [0.0; 2]);
}

#[test]
fn contributions_are_the_output() {
    let (layer, data) = (noise_layer(config(), 7), fill::<f32>(26 * 12, 2));
    let (x, mut workspace, mut y) =
        (Tokens::ragged(&data, &STARTS).unwrap(), Workspace::new(), vec![0.0; 26 * 11]);
    assert!(layer.projected(x, x, &workspace).is_err(), "nothing has been computed");
    layer.forward(x, &Attention::new(), &mut workspace, &mut y).unwrap();
    let mut sum = layer.linears()[3].bias().unwrap().repeat(26);
    let mut all = Vec::new();
    layer
        .contributions(x, Run::default(), &workspace, |head, part| {
            assert_eq!(all.len(), head * part.len());
            all.extend_from_slice(part);
            sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        })
        .unwrap();
    for (got, want) in sum.iter().zip(&y) {
        near(f64::from(*got), f64::from(*want), 1e-4, "sum of the parts");
    }
    let cosines = OutputCosine::new(View::bhld(&all, [1, 4, 26, 11]).unwrap()).cosines();
    assert_eq!(cosines.heads(), 4);
    let out = layer.head_outputs(x, &workspace).unwrap();
    assert_eq!(out.shape(), [3, 4, 17, 7]);
}
