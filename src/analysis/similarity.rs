//! How alike the heads of a layer are, and an order that puts like beside like.

use headwise_kernels::{Call, Element, Error, Level, Stored, View, divergence};

use super::blocks::{self, Block};
use crate::attention::resolve_level;
use crate::{Attention, plan};

/// A number for each pair of heads, symmetric, `[heads, heads]`.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadMatrix {
    heads: usize,
    values: Vec<f64>,
}

impl HeadMatrix {
    /// From `heads * heads` values, row by row; of a pair the one above the diagonal counts.
    ///
    /// # Errors
    /// [`Error::Length`] unless there are `heads * heads` values.
    pub fn new(heads: usize, values: Vec<f64>) -> Result<Self, Error> {
        let expected = heads.saturating_mul(heads);
        if values.len() != expected {
            return Err(Error::Length { argument: "values", got: values.len(), expected });
        }
        Ok(Self { heads, values })
    }

    fn from_fn(heads: usize, f: impl Fn(usize, usize) -> f64) -> Self {
        let values = (0..heads * heads).map(|at| (at / heads, at % heads));
        Self { heads, values: values.map(|(a, b)| f(a.min(b), a.max(b))).collect() }
    }

    /// The number of heads.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// All values, row by row.
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// The value of two heads, if they are there.
    pub fn get(&self, a: usize, b: usize) -> Option<f64> {
        (a < self.heads && b < self.heads).then(|| self.values[a * self.heads + b])
    }
}

/// The mean Jensen-Shannon distance between the rows of each two heads: sums, so that those of many calls
/// [add up](Self::add).
///
/// ```text
/// JS(p, q)^2 = (KL(p | m) + KL(q | m)) / 2 / ln 2     m = (p + q) / 2     0: equal, 1: no key in common
/// ```
///
/// The square root makes it a metric (Endres and Schindelin 2003, "A New Metric for Probability
/// Distributions"); Clark et al. 2019 compare heads by the divergence, its square.
#[derive(Debug, Clone, PartialEq)]
pub struct JensenShannon {
    heads: usize,
    sums: Vec<f64>,
    rows: Vec<u64>,
}

impl JensenShannon {
    /// Over the rows of one call: those where both heads see a key. A sink counts as a key that all heads
    /// share. Weights of a few rows of all heads are held at a time: `O(Hq * Lk)` memory.
    ///
    /// ```
    /// use headwise::{Attention, View, similarity::JensenShannon};
    /// let x: Vec<f32> = (0..3 * 7 * 4).map(|i| (i as f32).sin()).collect();
    /// let x = View::bhld(&x, [1, 3, 7, 4])?;
    /// let distances = JensenShannon::new(&Attention::new(), x, x)?.distances();
    /// assert_eq!(distances.get(1, 1), Some(0.0));
    /// assert!(distances.get(0, 2) > Some(0.0));
    /// # Ok::<(), headwise::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Attention::scores`].
    pub fn new<'a, T: Element, C: Stored>(
        attention: &Attention<'a>,
        q: View<'a, T>,
        k: View<'a, C>,
    ) -> Result<Self, Error> {
        let ([batch, heads, ..], on) = (q.shape(), attention.runs_on());
        let shape = [heads, heads.saturating_sub(1), 1, 1];
        let mut sums: Vec<f64> = blocks::zeros("pairs", shape)?;
        let pairs = sums.len() / 2;
        sums.truncate(pairs);
        let mut rows = vec![0; pairs];
        let (level, mut distances) = (resolve_level(on.level)?, Vec::new());
        blocks::each(attention, q, k, heads.max(1), |call, block| {
            // The distances of each row of the block, which are added in their order.
            let all = batch * block.queries.len();
            distances.resize(all * pairs, 0.0);
            let threads = plan::threads_for(on.threads, COST * distances.len() * call.keys_axis());
            plan::share_rows(threads, &mut distances, pairs, |first, distances| {
                for (at, distances) in distances.chunks_exact_mut(pairs.max(1)).enumerate() {
                    let (b, i) = ((first + at) % batch, block.queries.start + (first + at) / batch);
                    apart(level, call, block, [b, i], distances)?;
                }
                Ok(())
            })?;
            for row in distances.chunks_exact(pairs.max(1)) {
                for ((sum, rows), &x) in sums.iter_mut().zip(&mut rows).zip(row).filter(|(_, x)| **x >= 0.0) {
                    *sum += f64::from(x);
                    *rows += 1;
                }
            }
            Ok(())
        })?;
        Ok(Self { heads, sums, rows })
    }

    /// Joins the distances over other rows of the same heads.
    ///
    /// # Errors
    /// [`Error::Length`] if `other` has another number of heads.
    pub fn add(&mut self, other: &Self) -> Result<(), Error> {
        same(other.heads, self.heads)?;
        self.sums.iter_mut().zip(&other.sums).for_each(|(sum, more)| *sum += more);
        self.rows.iter_mut().zip(&other.rows).for_each(|(rows, more)| *rows += more);
        Ok(())
    }

    /// The mean distances, 0 to 1; 0 for heads without a common row.
    pub fn distances(&self) -> HeadMatrix {
        HeadMatrix::from_fn(self.heads, |a, b| match a == b {
            true => 0.0,
            false => {
                let pair = pair(self.heads, a, b);
                self.sums[pair] / self.rows[pair].max(1) as f64
            }
        })
    }
}

/// Multiply-adds that a key of two heads costs.
const COST: usize = 4;

/// The distances of each two heads in a row of a block; -1 where one of them sees nothing.
fn apart(
    level: Level,
    call: &Call<'_>,
    block: &Block<'_>,
    [b, i]: [usize; 2],
    distances: &mut [f32],
) -> Result<(), Error> {
    let len = if i < call.q_len(b) { call.kv_len(b) } else { 0 };
    let rows: Vec<&[f32]> = block.heads.clone().map(|head| &block.row(b, head, i)[..len]).collect();
    let sees: Vec<bool> = rows.iter().map(|row| row.iter().any(|&p| p > 0.0)).collect();
    // What the keys lack to 1 is the sink's.
    let sink = |row: &&[f32]| {
        let keys: f64 = row.iter().map(|&p| f64::from(p)).sum();
        call.terms().sinks.map_or(0.0, |_| (1.0 - keys).max(0.0) as f32)
    };
    let sinks: Vec<f32> = rows.iter().map(sink).collect();
    for (distance, (x, y)) in distances.iter_mut().zip(each_pair(rows.len())) {
        *distance = -1.0;
        if sees[x] && sees[y] {
            let keys = divergence(level, rows[x], rows[y])?;
            let sink = divergence(level, &[sinks[x]], &[sinks[y]])?;
            *distance = ((keys + sink) / std::f64::consts::LN_2).sqrt().min(1.0) as f32;
        }
    }
    Ok(())
}

/// The pairs of different heads: `(0, 1), (0, 2), .. (1, 2), ..`
fn each_pair(heads: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..heads).flat_map(move |a| (a + 1..heads).map(move |b| (a, b)))
}

/// The place of a pair `a < b` among them.
fn pair(heads: usize, a: usize, b: usize) -> usize {
    a * (2 * heads - a - 1) / 2 + b - a - 1
}

fn same(got: usize, expected: usize) -> Result<(), Error> {
    if got == expected { Ok(()) } else { Err(Error::Length { argument: "heads", got, expected }) }
}

/// The cosines of the outputs of each two heads, over all rows as one vector: inner products, so that those
/// of many calls [add up](Self::add).
#[derive(Debug, Clone, PartialEq)]
pub struct OutputCosine {
    heads: usize,
    products: Vec<f64>,
}

impl OutputCosine {
    /// Of outputs `[B, H, L, D]`: of the heads themselves, as attention returns them, or of what each adds to
    /// the layer's output ([`crate::MultiHead::contributions`]), where features mean the same for all heads.
    /// Rows of zeros, as behind `q_lens`, change nothing.
    ///
    /// ```
    /// use headwise::{View, similarity::OutputCosine};
    /// let out = [1.0, 0.0, /* head 1 */ 0.0, 2.0, /* head 2 */ 3.0, 3.0];
    /// let cosines = OutputCosine::new(View::bhld(&out, [1, 3, 1, 2])?).cosines();
    /// assert_eq!(cosines.get(0, 1), Some(0.0));
    /// assert!((cosines.get(0, 2).unwrap() - 0.5f64.sqrt()).abs() < 1e-12);
    /// # Ok::<(), headwise::Error>(())
    /// ```
    pub fn new<T: Element>(out: View<'_, T>) -> Self {
        let [batch, heads, tokens, d] = out.shape();
        let mut products = vec![0.0; heads.saturating_mul(heads)];
        let mut row = vec![0.0; heads.saturating_mul(d)];
        for (b, i) in (0..batch).flat_map(|b| (0..tokens).map(move |i| (b, i))) {
            if out.get([b, 0, i, 0]).is_none() {
                continue; // behind a packed sequence, or no features
            }
            for (at, x) in row.iter_mut().enumerate() {
                *x = out.get([b, at / d, i, at % d]).map_or(0.0, |x| f64::from(x.to_f32()));
            }
            for a in 0..heads {
                for b in a..heads {
                    let (x, y) = (&row[a * d..][..d], &row[b * d..][..d]);
                    products[a * heads + b] += x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
                }
            }
        }
        Self { heads, products }
    }

    /// Joins the products over other rows of the same heads.
    ///
    /// # Errors
    /// [`Error::Length`] if `other` has another number of heads.
    pub fn add(&mut self, other: &Self) -> Result<(), Error> {
        same(other.heads, self.heads)?;
        self.products.iter_mut().zip(&other.products).for_each(|(sum, more)| *sum += more);
        Ok(())
    }

    /// The cosines, -1 to 1; 0 for a head without output.
    pub fn cosines(&self) -> HeadMatrix {
        let product = |a: usize, b: usize| self.products[a * self.heads + b];
        HeadMatrix::from_fn(self.heads, |a, b| {
            let norms = (product(a, a) * product(b, b)).sqrt();
            if norms > 0.0 { (product(a, b) / norms).clamp(-1.0, 1.0) } else { 0.0 }
        })
    }
}

/// Heads in groups of like ones: see [`cluster`].
#[derive(Debug, Clone, PartialEq)]
pub struct Clusters {
    /// What has been joined, the nearest first. Groups `0..heads` are the heads, group `heads + n` is that of
    /// merge `n`.
    pub merges: Vec<Merge>,
    /// The heads in the order of the tree's leaves: like beside like.
    pub order: Vec<usize>,
}

/// Two groups of heads that have become one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Merge {
    /// The groups, the one with the smallest head first.
    pub groups: [usize; 2],
    /// Mean distance between the heads of one and of the other.
    pub distance: f64,
    /// Heads in both.
    pub size: usize,
}

/// Hierarchical clustering with average linkage (Sokal and Michener 1958; UPGMA): the two groups with the
/// smallest mean distance between their heads become one, until one is left. Equal distances: the smaller
/// heads first. `O(heads^3)` time.
///
/// ```
/// use headwise::similarity::{HeadMatrix, cluster};
/// let distances = HeadMatrix::new(3, vec![0.0, 0.9, 0.1, 0.9, 0.0, 0.7, 0.1, 0.7, 0.0])?;
/// assert_eq!(cluster(&distances).order, [0, 2, 1]);
/// # Ok::<(), headwise::Error>(())
/// ```
pub fn cluster(distances: &HeadMatrix) -> Clusters {
    struct Group {
        number: usize,
        heads: Vec<usize>,
        /// To each group of the list.
        distances: Vec<f64>,
    }
    let n = distances.heads;
    let row = |a: usize| (0..n).map(|b| distances.values[a.min(b) * n + a.max(b)]).collect();
    let mut groups: Vec<Group> =
        (0..n).map(|head| Group { number: head, heads: vec![head], distances: row(head) }).collect();
    let mut merges = Vec::new();
    while groups.len() > 1 {
        let distance = |&(a, b): &(usize, usize)| groups[a].distances[b];
        let nearest = each_pair(groups.len()).min_by(|x, y| distance(x).total_cmp(&distance(y)));
        let Some((a, b)) = nearest else { break };
        let distance = groups[a].distances[b];
        let gone = groups.remove(b);
        groups.iter_mut().for_each(|group| _ = group.distances.remove(b));
        let (size, more) = (groups[a].heads.len() as f64, gone.heads.len() as f64);
        let far = gone.distances.iter().enumerate().filter(|&(c, _)| c != b).map(|(_, x)| *x);
        let mean: Vec<f64> =
            groups[a].distances.iter().zip(far).map(|(x, y)| (x * size + y * more) / (size + more)).collect();
        for (c, mean) in mean.into_iter().enumerate() {
            groups[a].distances[c] = mean;
            groups[c].distances[a] = mean;
        }
        let group = &mut groups[a];
        group.heads.extend(gone.heads);
        merges.push(Merge { groups: [group.number, gone.number], distance, size: group.heads.len() });
        group.number = n + merges.len() - 1;
    }
    let order = groups.pop().map_or(Vec::new(), |group| group.heads);
    Clusters { merges, order }
}
