//! BERT in f64, text by text, one pass after the other.

use super::{HEADS, HIDDEN, LAYERS, Model};

pub type Rows = Vec<Vec<f64>>;
/// A factor on the output of each head.
pub type Gates = [[f64; HEADS]; LAYERS];
/// All of them whole.
pub const WHOLE: Gates = [[1.0; HEADS]; LAYERS];

impl Model {
    fn tensor(&self, name: &str) -> Vec<f64> {
        self.tensors[name].1.iter().map(|&x| f64::from(x)).collect()
    }

    fn linear(&self, name: &str, x: &Rows) -> Rows {
        let (weight, bias) = (self.tensor(&format!("{name}.weight")), self.tensor(&format!("{name}.bias")));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let row = |x: &Vec<f64>| weight.chunks(x.len()).zip(&bias).map(|(w, b)| dot(w, x) + b).collect();
        x.iter().map(row).collect()
    }

    fn norm(&self, name: &str, x: &Rows) -> Rows {
        let (weight, bias) = (self.tensor(&format!("{name}.weight")), self.tensor(&format!("{name}.bias")));
        let row = |x: &Vec<f64>| {
            let mean = x.iter().sum::<f64>() / x.len() as f64;
            let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
            let scale = 1.0 / (variance + 1e-12).sqrt();
            x.iter().zip(&weight).zip(&bias).map(|((x, w), b)| (x - mean) * scale * w + b).collect()
        };
        x.iter().map(row).collect()
    }

    /// The rows behind the last layer, and the attention maps of each layer, `[heads, tokens, tokens]`. Gates
    /// are factors on the output of each head.
    pub fn rows(&self, ids: &[usize], gates: &Gates) -> (Rows, Vec<Vec<Rows>>) {
        let [words, places, kinds] = ["word", "position", "token_type"]
            .map(|name| self.tensor(&format!("embeddings.{name}_embeddings.weight")));
        let row = |(i, &id): (usize, &usize)| {
            (0..HIDDEN).map(|c| words[id * HIDDEN + c] + places[i * HIDDEN + c] + kinds[c]).collect()
        };
        let mut x = self.norm("embeddings.LayerNorm", &ids.iter().enumerate().map(row).collect());
        let mut maps = Vec::new();
        for (layer, gates) in gates.iter().enumerate() {
            let name = |part: &str| format!("encoder.layer.{layer}.{part}");
            let [q, k, v] = ["query", "key", "value"]
                .map(|part| self.linear(&name(&format!("attention.self.{part}")), &x));
            let (heads, map) = attention(&q, &k, &v, gates);
            maps.push(map);
            let sum = add(&x, &self.linear(&name("attention.output.dense"), &heads));
            x = self.norm(&name("attention.output.LayerNorm"), &sum);
            let mut inner = self.linear(&name("intermediate.dense"), &x);
            inner.iter_mut().flatten().for_each(|x| *x = *x / 2.0 * (1.0 + erf(*x / 2f64.sqrt())));
            let sum = add(&x, &self.linear(&name("output.dense"), &inner));
            x = self.norm(&name("output.LayerNorm"), &sum);
        }
        (x, maps)
    }

    /// The normalised mean of some rows.
    pub fn embedding(&self, ids: &[usize], first_only: bool, gates: &Gates) -> Vec<f64> {
        let (rows, _) = self.rows(ids, gates);
        let rows = if first_only { &rows[..1] } else { &rows[..] };
        let sum: Vec<f64> = (0..HIDDEN).map(|c| rows.iter().map(|row| row[c]).sum()).collect();
        let length = sum.iter().map(|x| x * x).sum::<f64>().sqrt();
        sum.iter().map(|x| x / length).collect()
    }
}

fn add(a: &Rows, b: &Rows) -> Rows {
    a.iter().zip(b).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a + b).collect()).collect()
}

fn attention(q: &Rows, k: &Rows, v: &Rows, gates: &[f64; HEADS]) -> (Rows, Vec<Rows>) {
    let d = HIDDEN / HEADS;
    let (mut out, mut maps) = (vec![vec![0.0; HIDDEN]; q.len()], Vec::new());
    for (head, gate) in gates.iter().enumerate() {
        let columns = head * d..(head + 1) * d;
        let mut map = Vec::new();
        for (q, out) in q.iter().zip(&mut out) {
            let dot = |k: &Vec<f64>| columns.clone().map(|c| q[c] * k[c]).sum::<f64>();
            let weights: Vec<f64> = k.iter().map(|k| (dot(k) / (d as f64).sqrt()).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let weights: Vec<f64> = weights.iter().map(|w| w / sum).collect();
            for c in columns.clone() {
                out[c] = gate * weights.iter().zip(v).map(|(w, v)| w * v[c]).sum::<f64>();
            }
            map.push(weights);
        }
        maps.push(map);
    }
    (out, maps)
}

/// By its series (Abramowitz and Stegun 1964, 7.1.6: all terms positive).
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    sum * 2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp()
}
