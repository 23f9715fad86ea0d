//! What is said of a head, and that nothing is said of heads that nobody has trained.

use headwise::layer::{Linear, MultiHead, MultiHeadConfig, Tokens, WeightLayout, Workspace};
use headwise::{Attention, Statistic, StatisticsOptions, ViewMut};
use headwise_cli::heads::{Chance, Figures, Label, labels};

use crate::*;

/// Numbers like those of a normal distribution: the sum of twelve even ones, less six.
fn normal(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut even = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..n).map(|_| (0..12).map(|_| even()).sum::<f32>() - 6.0).collect()
}

/// Layers of all sizes of weights, from nearly equal attention to nearly hard: of none of them anything is
/// said.
#[test]
fn nothing_is_claimed_of_random_layers() {
    const D: usize = 96;
    const HEADS: usize = 12;
    const SENTENCES: usize = 30;
    let lens: Vec<usize> = (0..SENTENCES).map(|i| 8 + 7 * i % 25).collect();
    let starts: Vec<usize> = std::iter::once(0)
        .chain(lens.iter().scan(0, |sum, len| {
            *sum += len;
            Some(*sum)
        }))
        .collect();
    let (rows, longest) = (starts[SENTENCES], 32);
    let last: Vec<bool> = lens.iter().flat_map(|len| (0..longest).map(move |at| at + 1 == *len)).collect();
    for (seed, size) in [0.1, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0].into_iter().enumerate() {
        let data = normal(100 + seed as u64, rows * D);
        let x = Tokens::ragged(&data, &starts).expect("sentences");
        let linear = |n: u64| {
            let scale = size / (D as f32).sqrt();
            let weights: Vec<f32> = normal(10 * seed as u64 + n, D * D).iter().map(|x| x * scale).collect();
            Linear::new(&weights, WeightLayout::OutIn, [D; 2], None).expect("a square")
        };
        let config = MultiHeadConfig::new(D, HEADS);
        let layer = MultiHead::new(config, linear(1), linear(2), linear(3), linear(4)).expect("a layer");
        let (mut y, mut workspace) = (vec![0.0; rows * D], Workspace::new());
        layer.forward(x, &Attention::new(), &mut workspace, &mut y).expect("a pass");
        let [q, k, v] = layer.projected(x, x, &workspace).expect("its projections");
        let to = ViewMut::blhd(&mut y, [1, rows, HEADS, D / HEADS]).and_then(|to| to.packed(&starts));
        let options = StatisticsOptions::new().special(&last);
        let statistics =
            Attention::new().run_with_statistics(q, k, v, to.expect("a view"), &options).expect("statistics");
        let heads = statistics.heads();
        for statistic in Statistic::ALL {
            assert!(heads.iter().all(|head| head.rows(statistic) > 0), "{statistic}");
        }
        let figures: Vec<Figures> = heads.iter().map(Figures::from).collect();
        let one = SENTENCES as f64 / rows as f64;
        let chance = Chance { one, neighbour: one, separators: one };
        for (head, labels) in labels(&figures, &chance).iter().enumerate() {
            assert_eq!(labels, &[], "weights of size {size}, head {head}: {:?}", figures[head]);
        }
    }
}

/// The same through the command, on a whole model.
#[test]
fn nothing_is_claimed_of_a_random_model() {
    let folder = Model::new().write("random");
    let report = report(&folder, &text(&folder, TEXT));
    for head in list(&report, "heads") {
        assert_eq!(list(head, "labels"), &[] as &[Value], "{head}");
    }
}

#[test]
fn labels_are_thresholds() {
    let chance = Chance { one: 0.05, neighbour: 0.05, separators: 0.2 };
    let plain = Figures { normalised_entropy: 0.6, ..Figures::default() };
    let of = |figures: Figures, chance: &Chance| labels(&[plain, figures, plain], chance).swap_remove(1);
    assert_eq!(of(plain, &chance), []);
    assert_eq!(of(Figures { previous: 0.5, ..plain }, &chance), []);
    assert_eq!(of(Figures { previous: 0.51, ..plain }, &chance), [Label::Previous]);
    assert_eq!(of(Figures { next: 0.51, ..plain }, &chance), [Label::Next]);
    assert_eq!(of(Figures { diagonal: 0.51, ..plain }, &chance), [Label::Itself]);
    assert_eq!(of(Figures { first: 0.51, ..plain }, &chance), [Label::First]);
    // Half of the keys are separators in short sentences: that alone is no finding.
    assert_eq!(of(Figures { separators: 0.59, ..plain }, &chance), []);
    assert_eq!(of(Figures { separators: 0.61, ..plain }, &chance), [Label::Separators]);
    assert_eq!(of(Figures { normalised_entropy: 0.95, ..plain }, &chance), [Label::Broad]);
    // Where all heads are broad, none is.
    let broad = [Figures { normalised_entropy: 0.99, ..plain }; 4];
    assert_eq!(labels(&broad, &chance), [[]; 4]);
    assert!(labels(&[], &chance).is_empty());
}
