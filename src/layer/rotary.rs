//! Rotary positions (Su et al. 2021, "RoFormer", section 3.2.2): pairs of features turn by an angle that
//! grows with the token's position, so that `<q_i, k_j>` knows of `i - j` only.
//!
//! ```text
//! (a, b) -> (a cos - b sin, b cos + a sin)         angle = position * frequency(i),   i < width / 2
//! frequency(i) = base^(-2 i / width), scaled
//! ```
//!
//! Angles, sines and cosines are computed in f64: at position 1e5 an f32 angle would be off by 0.004.

use std::cell::RefCell;
use std::sync::Arc;

use headwise_kernels::{Error, Level, rotate};

pub use headwise_kernels::Pairing;

use crate::attention::resolve_level;

/// How the frequencies of a model are stretched for longer contexts than it was trained with.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum RotaryScaling {
    /// Not at all.
    #[default]
    None,
    /// All frequencies divided by `factor`: positions interpolated (Chen et al. 2023, "Extending Context
    /// Window of Large Language Models via Positional Interpolation", section 2.3).
    Linear {
        /// The longer context by the shorter.
        factor: f64,
    },
    /// The base multiplied by `factor^(width / (width - 2))`, which leaves the highest frequency as it is and
    /// divides the lowest by `factor` ("NTK-aware": Peng et al. 2023, "YaRN", section 3.1).
    Ntk {
        /// The longer context by the shorter.
        factor: f64,
    },
    /// Low frequencies divided by `factor`, high ones as they are, those between interpolated (Llama 3.1, as
    /// its configuration files name the numbers).
    Llama3 {
        /// `factor`, such as 8.
        factor: f64,
        /// `low_freq_factor`, such as 1.
        low: f64,
        /// `high_freq_factor`, such as 4.
        high: f64,
        /// `original_max_position_embeddings`, such as 8192.
        original: f64,
    },
}

/// The rotary positions of a layer's queries and keys. Clones share one table.
///
/// ```
/// use headwise::layer::{Pairing, Rotary};
/// // The first 4 of 8 features turn: pairs (0, 2) and (1, 3), frequencies 1 and 1/100.
/// let rotary = Rotary::new(4, Pairing::Halves, 10_000.0)?;
/// let mut x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
/// rotary.rotate(&mut x, 8, 3)?;
/// let want = [-1.41335252, 1.87911807, -2.82885748, 4.05819114, 5.0, 6.0, 7.0, 8.0];
/// assert!(x.iter().zip(want).all(|(x, want): (&f32, f32)| (x - want).abs() < 1e-6));
/// # Ok::<(), headwise::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Rotary {
    pairing: Pairing,
    frequencies: Arc<[f64]>,
    /// Cosines, then sines, of each position from 0 on.
    table: Arc<[f32]>,
}

/// Positions whose sines are kept.
const TABLE: usize = 2048;

impl Rotary {
    /// The first `width` features of each head turn, with `frequency(i) = base^(-2 i / width)`.
    ///
    /// # Errors
    /// [`Error::Value`] unless `width` is even and `base` finite and above 0.
    pub fn new(width: usize, pairing: Pairing, base: f64) -> Result<Self, Error> {
        Self::scaled(width, pairing, base, RotaryScaling::None)
    }

    /// As [`Rotary::new`], with frequencies scaled.
    ///
    /// # Errors
    /// As [`Rotary::new`]; [`Error::Value`] unless the numbers of the scaling are finite and above 0 and, of
    /// Llama 3, `high` is above `low`.
    pub fn scaled(width: usize, pairing: Pairing, base: f64, scaling: RotaryScaling) -> Result<Self, Error> {
        let positive = |argument, x: f64| match x.is_finite() && x > 0.0 {
            true => Ok(x),
            false => Err(Error::Value { argument, got: x as f32, must: "finite and above 0" }),
        };
        let n = width as f64;
        let base = match scaling {
            RotaryScaling::Ntk { factor } if width > 2 => {
                base * positive("factor", factor)?.powf(n / (n - 2.0))
            }
            _ => base,
        };
        positive("base", base)?;
        let mut frequencies: Vec<f64> = (0..width / 2).map(|i| base.powf(-2.0 * i as f64 / n)).collect();
        match scaling {
            RotaryScaling::None | RotaryScaling::Ntk { .. } => {}
            RotaryScaling::Linear { factor } => {
                let factor = positive("factor", factor)?;
                frequencies.iter_mut().for_each(|f| *f /= factor);
            }
            RotaryScaling::Llama3 { factor, low, high, original } => {
                for (argument, x) in [("factor", factor), ("low", low), ("original", original)] {
                    positive(argument, x)?;
                }
                if !(high.is_finite() && high > low) {
                    return Err(Error::Value { argument: "high", got: high as f32, must: "above low" });
                }
                for f in &mut frequencies {
                    let turns = original * *f / core::f64::consts::TAU; // in the original context
                    let smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    *f = (1.0 - smooth) * *f / factor + smooth * *f;
                }
            }
        }
        Self::with_frequencies(width, pairing, &frequencies)
    }

    /// Any frequencies, `width / 2` of them, in radians a position.
    ///
    /// # Errors
    /// [`Error::Value`] unless `width` is even, [`Error::Length`] unless there are half as many frequencies.
    pub fn with_frequencies(width: usize, pairing: Pairing, frequencies: &[f64]) -> Result<Self, Error> {
        if width % 2 == 1 {
            return Err(Error::Value { argument: "rotary width", got: width as f32, must: "even" });
        }
        if frequencies.len() != width / 2 {
            let (got, expected) = (frequencies.len(), width / 2);
            return Err(Error::Length { argument: "frequencies", got, expected });
        }
        let mut table = Vec::with_capacity(TABLE * width);
        (0..TABLE).for_each(|position| sines(frequencies, position, &mut table));
        Ok(Self { pairing, frequencies: frequencies.into(), table: table.into() })
    }

    /// Features of a head that turn.
    pub fn width(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Which features turn together.
    pub fn pairing(&self) -> Pairing {
        self.pairing
    }

    /// Radians a position, one for each pair.
    pub fn frequencies(&self) -> &[f64] {
        &self.frequencies
    }

    /// Turns all heads of one token, `row [heads, d]`, which stands at `position`.
    ///
    /// # Errors
    /// [`Error::Length`] if a head has fewer features than turn or `row` is not whole heads.
    pub fn rotate(&self, row: &mut [f32], d: usize, position: usize) -> Result<(), Error> {
        self.rotate_at(resolve_level(None)?, row, d, position)
    }

    pub(crate) fn rotate_at(
        &self,
        level: Level,
        row: &mut [f32],
        d: usize,
        position: usize,
    ) -> Result<(), Error> {
        thread_local! {
            static FAR: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
        }
        let width = self.width();
        let turn = |both: &[f32], row| {
            let (cos, sin) = both.split_at(width / 2);
            rotate(level, self.pairing, [cos, sin], row, d)
        };
        if position < TABLE {
            return turn(&self.table[position * width..][..width], row);
        }
        FAR.with_borrow_mut(|far| {
            far.clear();
            sines(&self.frequencies, position, far);
            turn(far, row)
        })
    }
}

/// Appends the cosines and then the sines of a position.
fn sines(frequencies: &[f64], position: usize, to: &mut Vec<f32>) {
    let angle = |f: &f64| position as f64 * f;
    to.extend(frequencies.iter().map(|f| angle(f).cos() as f32));
    to.extend(frequencies.iter().map(|f| angle(f).sin() as f32));
}
