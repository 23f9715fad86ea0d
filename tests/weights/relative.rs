//! T5: no scale, and a bias by distance.

use headwise::layer::{Checkpoint, Distances, LayerOptions, RelativeBias, Tokens, Workspace};
use headwise::{Attention, Error, View};

use crate::{File, numbers};

/// Distance (key minus query) and bucket, of both sides and of the past: what the formula in the code of the
/// paper gives in f32, with 32 buckets up to 128.
const BUCKETS: [(isize, usize, usize); 33] = [
    (-1000, 15, 31),
    (-128, 15, 31),
    (-127, 15, 31),
    (-91, 15, 29),
    (-90, 14, 29),
    (-64, 14, 26),
    (-63, 13, 26),
    (-46, 13, 24),
    (-45, 12, 23),
    (-32, 12, 21),
    (-31, 11, 21),
    (-23, 11, 18),
    (-22, 10, 18),
    (-17, 10, 16),
    (-16, 10, 16),
    (-15, 9, 15),
    (-12, 9, 12),
    (-11, 8, 11),
    (-8, 8, 8),
    (-7, 7, 7),
    (-1, 1, 1),
    (0, 0, 0),
    (1, 17, 0),
    (7, 23, 0),
    (8, 24, 0),
    (11, 24, 0),
    (12, 25, 0),
    (16, 26, 0),
    (45, 28, 0),
    (46, 29, 0),
    (64, 30, 0),
    (91, 31, 0),
    (1000, 31, 0),
];

#[test]
fn buckets_are_the_published_ones() {
    let table: Vec<f32> = (0..64).map(|i| i as f32).collect(); // bucket b of head h holds 2 b + h
    for (distances, side) in [(Distances::Both, 0), (Distances::Past, 1)] {
        let relative = RelativeBias::new(&table, [32, 2], distances, 128).expect("T5's sizes");
        for (distance, both, past) in BUCKETS {
            let want = [both, past][side] as f32;
            // One query at `-distance`, key 0.
            assert_eq!(
                relative.scores(1, 1, -distance),
                Ok(vec![2.0 * want, 2.0 * want + 1.0]),
                "{distance}"
            );
        }
    }
}

#[test]
fn sizes_that_make_no_buckets_are_refused() {
    let new = |len: usize, sizes, distances, max| RelativeBias::new(&vec![0.0; len], sizes, distances, max);
    let refused = new(3, [4, 1], Distances::Past, 8);
    assert_eq!(refused, Err(Error::Length { argument: "table", got: 3, expected: 4 }));
    assert!(matches!(new(3, [3, 1], Distances::Both, 8), Err(Error::Value { argument: "buckets", .. })));
    assert!(matches!(new(8, [8, 1], Distances::Both, 2), Err(Error::Value { argument: "max_distance", .. })));
    let good = new(8, [8, 1], Distances::Both, 3).expect("sizes of a bias");
    for (queries, keys) in [(usize::MAX, 1 << 40), (1 << 40, 1 << 30)] {
        let error = Error::TooLarge { argument: "bias", shape: [1, 1, queries, keys] };
        assert_eq!(good.scores(queries, keys, 0), Err(error));
    }
}

/// A T5 layer with its bias, against the formula in f64, over two sequences of different lengths.
#[test]
fn a_t5_layer_with_its_bias() {
    const WIDTH: usize = 6;
    const HEADS: usize = 2;
    const D: usize = 3;
    let weights: Vec<Vec<f32>> = (0..4).map(|seed| numbers(seed, WIDTH * WIDTH)).collect();
    let table = numbers(7, 8 * HEADS);
    let mut file = File::default().with("relative_attention_bias.weight", &[8, HEADS], &table);
    for (name, weights) in ["q", "k", "v", "o"].iter().zip(&weights) {
        file = file.with(&format!("{name}.weight"), &[WIDTH, WIDTH], weights);
    }
    let bytes = file.bytes();
    let checkpoint = Checkpoint::new([&bytes[..]]).expect("a valid file");
    let layer = checkpoint.multi_head("", LayerOptions::new(HEADS)).expect("a layer");
    let relative = checkpoint.relative_bias("", Distances::Both, 16).expect("a table").expect("it is there");
    assert_eq!(checkpoint.relative_bias("other", Distances::Both, 16), Ok(None));

    let (starts, longest) = ([0, 5, 14], 9);
    let x = numbers(9, starts[2] * WIDTH);
    let bias = relative.scores(longest, longest, 0).expect("a small bias");
    let view = View::bhld(&bias, [1, HEADS, longest, longest]).expect("a bias");
    let mut y = vec![0.0; x.len()];
    let tokens = Tokens::ragged(&x, &starts).expect("two sequences");
    layer.forward(tokens, &Attention::new().bias(view), &mut Workspace::new(), &mut y).expect("it runs");

    let map = |weights: &[f32], x: &[f64]| -> Vec<f64> {
        weights.chunks(WIDTH).map(|row| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum()).collect()
    };
    for bounds in starts.windows(2) {
        let rows: Vec<Vec<f64>> = x[bounds[0] * WIDTH..bounds[1] * WIDTH]
            .chunks(WIDTH)
            .map(|row| row.iter().map(|&x| f64::from(x)).collect())
            .collect();
        let [q, k, v] = [0, 1, 2].map(|part| rows.iter().map(|x| map(&weights[part], x)).collect::<Vec<_>>());
        for i in 0..rows.len() {
            let mut joined = vec![0.0; WIDTH];
            for h in 0..HEADS {
                let of_head = |x: &[f64]| x[h * D..(h + 1) * D].to_vec();
                let score = |j: usize| {
                    let dot: f64 = of_head(&q[i]).iter().zip(of_head(&k[j])).map(|(q, k)| q * k).sum();
                    dot + f64::from(bias[(h * longest + i) * longest + j])
                };
                let weights: Vec<f64> = (0..rows.len()).map(|j| score(j).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for (j, weight) in weights.iter().enumerate() {
                    for (c, v) in of_head(&v[j]).into_iter().enumerate() {
                        joined[h * D + c] += weight / sum * v;
                    }
                }
            }
            let want = map(&weights[3], &joined);
            let got = &y[(bounds[0] + i) * WIDTH..][..WIDTH];
            for (got, want) in got.iter().zip(want) {
                assert!((f64::from(*got) - want).abs() < 2e-6, "row {i}: {got} {want}");
            }
        }
    }
}
