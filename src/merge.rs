//! Joining results over parts of the keys by their LSE.
//!
//! ```text
//! lse = ln(sum over parts p of exp(lse_p))        out = sum over parts p of exp(lse_p - lse) * out_p
//! ```

use headwise_kernels::Error;

/// The result of attention over some of the keys: `out` compact `[rows, Dv]`, `lse` one number a row.
#[derive(Debug, Clone, Copy)]
pub struct Partial<'a> {
    /// The rows.
    pub out: &'a [f32],
    /// Their LSE; a row with -inf saw nothing and counts for nothing, whatever it holds.
    pub lse: &'a [f32],
}

/// Joins results over disjoint parts of the keys into the result over all of them: `out` compact `[rows,
/// Dv]`, `lse` one number a row. Rows that no part has seen become 0 and -inf. A sink belongs to one part
/// only.
///
/// ```
/// use headwise::{Partial, merge};
/// let (mut out, mut lse) = ([0.0], [0.0]);
/// let [first, second] = [Partial { out: &[1.0], lse: &[0.2] }, Partial { out: &[3.0], lse: &[1.2] }];
/// merge(&[first, second], &mut out, &mut lse)?;
/// assert!((out[0] - 2.46211716).abs() < 1e-6 && (lse[0] - 1.51326169).abs() < 1e-6);
/// # Ok::<(), headwise::Error>(())
/// ```
///
/// Many sequences with one long prefix need not read its keys once each: attention over the prefix takes the
/// queries of all sequences as tokens of one batch entry, and is joined with that over what each has of its
/// own.
///
/// ```
/// use headwise::{Attention, Partial, View, ViewMut, merge};
/// let (b, h, prefix, own, d) = (3, 2, 50, 4, 8); // one query a sequence
/// let wave = |n: usize, f: f32| (0..n).map(|i| (f * i as f32).sin()).collect::<Vec<f32>>();
/// let (q, shared, k) = (wave(b * h * d, 0.1), wave(h * prefix * d, 0.2), wave(b * h * own * d, 0.3));
/// let (mut first, mut second, mut out) = (vec![0.0; b * h * d], vec![0.0; b * h * d], vec![0.0; b * h * d]);
/// let (mut lse_first, mut lse_second, mut lse) = (vec![0.0; b * h], vec![0.0; b * h], vec![0.0; b * h]);
/// // The output and its LSE lie as [B, H, D] and [B, H]: batch entries where tokens are.
/// let shared = View::bhld(&shared, [1, h, prefix, d])?;
/// let into = ViewMut::blhd(&mut first, [1, b, h, d])?;
/// let mut by_head = vec![0.0; b * h]; // [1, H, B]
/// Attention::new().run_with_lse(View::blhd(&q, [1, b, h, d])?, shared, shared, into, &mut by_head)?;
/// (0..b * h).for_each(|row| lse_first[row] = by_head[row % h * b + row / h]);
/// let own = View::bhld(&k, [b, h, own, d])?;
/// let (queries, into) = (View::bhld(&q, [b, h, 1, d])?, ViewMut::bhld(&mut second, [b, h, 1, d])?);
/// Attention::new().run_with_lse(queries, own, own, into, &mut lse_second)?;
/// let parts = [Partial { out: &first, lse: &lse_first }, Partial { out: &second, lse: &lse_second }];
/// merge(&parts, &mut out, &mut lse)?;
/// # Ok::<(), headwise::Error>(())
/// ```
///
/// # Errors
/// [`Error::Length`] if a slice does not fit the others.
pub fn merge(parts: &[Partial<'_>], out: &mut [f32], lse: &mut [f32]) -> Result<(), Error> {
    let dv = out.len().checked_div(lse.len()).unwrap_or(0);
    let expect = |argument, got, expected| {
        if got == expected { Ok(()) } else { Err(Error::Length { argument, got, expected }) }
    };
    expect("out", out.len(), dv * lse.len())?;
    for part in parts {
        expect("part.out", part.out.len(), out.len())?;
        expect("part.lse", part.lse.len(), lse.len())?;
    }
    for (row, lse) in lse.iter_mut().enumerate() {
        let out = &mut out[row * dv..][..dv];
        out.fill(0.0);
        let max = parts.iter().map(|part| part.lse[row]).fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        for part in parts {
            let weight = match part.lse[row] {
                f32::NEG_INFINITY => continue,
                lse if lse == max => 1.0, // also where both are +inf
                lse => (lse - max).exp(),
            };
            sum += weight;
            for (out, x) in out.iter_mut().zip(&part.out[row * dv..][..dv]) {
                *out += weight * x;
            }
        }
        *lse = if sum == 0.0 { f32::NEG_INFINITY } else { max + sum.ln() };
        if sum != 0.0 {
            out.iter_mut().for_each(|x| *x /= sum);
        }
    }
    Ok(())
}
