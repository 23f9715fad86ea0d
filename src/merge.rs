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
