//! The inputs of the named shapes, and the rows of the f64 reference that every result is checked against.

use std::sync::Arc;

use bytemuck::Pod;
use half::{bf16, f16};
use headwise::{
    Attention, DType, Element, Level, Position, Stored, Terms, View, ViewMut, Workspace, reference,
};

use super::buffer::Buffer;
use super::named::Shape;
use crate::Failure;

/// A shape with its inputs, uniform in [-1, 1] and rounded to their type, and some rows of the right answer.
pub(crate) trait Case: Send {
    fn shape(&self) -> Shape;
    /// One call of the library, on the current pool, in a workspace or the threads' own memory.
    fn attention(&mut self, level: Level, workspace: Option<&Workspace>) -> Result<(), headwise::Error>;
    /// Q, K and V, and the output, if they are f32.
    fn parts(&mut self) -> Option<([&[f32]; 3], &mut [f32])>;
    /// K and V in memory.
    fn kv(&self) -> [&[u8]; 2];
    /// Fills the output with NaN.
    fn clear(&mut self);
    /// The largest error of the output in the rows that are known; NaN counts as infinite.
    fn max_error(&self) -> f64;
    /// What it may be.
    fn error_limit(&self) -> f64;

    /// An error if the output, by the means named, is wrong.
    fn check(&self, by: &str) -> Result<(), Failure> {
        let (name, error, limit) = (self.shape().name, self.max_error(), self.error_limit());
        match error <= limit {
            true => Ok(()),
            false => {
                Err(Failure::wrong(format!("{name} by {by}: the error {error:.2e} exceeds {limit:.0e}")))
            }
        }
    }
}

/// A case for each shape. `i8` means integers for K and V and f32 for Q.
pub(crate) fn cases(shapes: &[Shape], dtype: DType) -> Result<Vec<Box<dyn Case>>, Failure> {
    match dtype {
        DType::F16 => Inputs::<f16, f16>::all(shapes),
        DType::Bf16 => Inputs::<bf16, bf16>::all(shapes),
        DType::I8 => Inputs::<f32, i8>::all(shapes),
        _ => Inputs::<f32, f32>::all(shapes),
    }
}

/// K and V of the largest shape, which the cases share: each uses the front.
struct Kv<C> {
    data: [Buffer<C>; 2],
    /// One for each token and head, for integers.
    scales: Buffer,
}

impl<C: Stored + Pod> Kv<C> {
    /// K (0) or V (1) of some heads from `head` on.
    fn view(&self, side: usize, head: usize, shape: [usize; 4]) -> Result<View<'_, C>, headwise::Error> {
        let [b, h, l, d] = shape;
        let view = View::bhld(&self.data[side][head * l * d..][..b * h * l * d], shape)?;
        if C::DTYPE != DType::I8 {
            return Ok(view);
        }
        view.scaled(View::bhld(&self.scales[head * l..][..b * h * l], [b, h, l, 1])?)
    }
}

struct Inputs<T, C> {
    shape: Shape,
    q: Buffer<T>,
    kv: Arc<Kv<C>>,
    out: Buffer<T>,
    /// Row of `out` and what it must hold.
    expected: Vec<(usize, Vec<f64>)>,
}

/// Multiply-adds of the reference that a shape may cost: the long ones are checked in fewer rows.
const REFERENCE_WORK: usize = 8_000_000;

impl<T: Element + Pod, C: Stored + Pod> Inputs<T, C> {
    fn all(shapes: &[Shape]) -> Result<Vec<Box<dyn Case>>, Failure> {
        let keys = shapes.iter().map(Shape::keys).max().unwrap_or(0);
        let rows = shapes.iter().map(|shape| shape.keys() / shape.d).max().unwrap_or(0);
        let factor = if C::DTYPE == DType::I8 { 127.0 } else { 1.0 };
        let numbers = |seed| {
            let number = uniform(seed);
            Buffer::new(keys, move |i| C::from_f32(number(i) * factor))
        };
        let scales = Buffer::new(rows, |_| 1.0 / 127.0)?;
        let kv = Arc::new(Kv { data: [numbers(2)?, numbers(3)?], scales });
        let case = |&shape| -> Result<Box<dyn Case>, Failure> {
            let mut inputs = Self::new(shape, Arc::clone(&kv))?;
            inputs.expected = inputs.some_rows().map_err(Failure::usage)?;
            Ok(Box::new(inputs))
        };
        shapes.iter().map(case).collect()
    }

    fn new(shape: Shape, kv: Arc<Kv<C>>) -> Result<Self, Failure> {
        let (rows, number) = (shape.b * shape.hq * shape.lq, uniform(1));
        let q = Buffer::new(rows * shape.d, move |i| T::from_f32(number(i)))?;
        let out = Buffer::new(rows * shape.d, |_| T::default())?;
        Ok(Self { shape, q, kv, out, expected: Vec::new() })
    }

    fn some_rows(&self) -> Result<Vec<(usize, Vec<f64>)>, headwise::Error> {
        let Shape { b, hq, hk, lq, lk, d, causal, .. } = self.shape;
        let rows = b * hq * lq;
        let samples = (REFERENCE_WORK / (lk * d)).clamp(8, rows);
        let row = |sample| sample * (rows - 1) / (samples - 1); // the first, the last, and others between
        let expected = (0..samples).map(row).map(|row| {
            let (b, h, i) = (row / (hq * lq), row / lq % hq, row % lq);
            let head = b * hk + h / (hq / hk);
            let position = Position::At((i + lk - lq) as i64);
            let q = View::bhld(&self.q[row * d..][..d], [1, 1, 1, d])?;
            let [k, v] = [0, 1].map(|side| self.kv.view(side, head, [1, 1, lk, d]));
            let answer = reference::attention(q, k?, v?, &Terms { causal, position, ..Terms::default() })?;
            Ok((row, answer.out))
        });
        expected.collect()
    }
}

impl<T: Element + Pod, C: Stored + Pod> Case for Inputs<T, C> {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn attention(&mut self, level: Level, workspace: Option<&Workspace>) -> Result<(), headwise::Error> {
        let Shape { b, hq, hk, lq, lk, d, causal, .. } = self.shape;
        let attention = if causal { Attention::new().causal() } else { Attention::new() };
        let attention = workspace.map_or(attention, |workspace| attention.workspace(workspace));
        let [k, v] = [0, 1].map(|side| self.kv.view(side, 0, [b, hk, lk, d]));
        let q = View::bhld(&self.q, [b, hq, lq, d])?;
        attention.level(level).run(q, k?, v?, ViewMut::bhld(&mut self.out, [b, hq, lq, d])?)
    }

    fn parts(&mut self) -> Option<([&[f32]; 3], &mut [f32])> {
        let [k, v] = self.kv.data.each_ref().map(|buffer| &buffer[..self.shape.keys()]);
        if T::DTYPE != DType::F32 || C::DTYPE != DType::F32 {
            return None;
        }
        let inputs = [bytemuck::cast_slice(&self.q), bytemuck::cast_slice(k), bytemuck::cast_slice(v)];
        Some((inputs, bytemuck::cast_slice_mut(&mut self.out)))
    }

    fn kv(&self) -> [&[u8]; 2] {
        self.kv.data.each_ref().map(|buffer| bytemuck::cast_slice(&buffer[..self.shape.keys()]))
    }

    fn clear(&mut self) {
        self.out.fill(T::from_f32(f32::NAN));
    }

    fn max_error(&self) -> f64 {
        let d = self.shape.d;
        let errors = self.expected.iter().flat_map(|(row, expected)| {
            let out = &self.out[row * d..][..d];
            out.iter().zip(expected).map(|(out, expected)| (f64::from(out.to_f32()) - expected).abs())
        });
        errors.fold(0.0, |max, error| if error.is_nan() { f64::INFINITY } else { error.max(max) })
    }

    /// 2e-6, and for a narrower output 2e-5 and half a unit in the last place of numbers up to 1, which where
    /// products are of bf16 are 2 units.
    fn error_limit(&self) -> f64 {
        match T::DTYPE {
            DType::F16 => 2f64.powi(-12) + 2e-5,
            DType::Bf16 => 2f64.powi(-7),
            _ => 2e-6,
        }
    }
}

/// Splitmix64, its upper 24 bits as a number in [-1, 1).
fn uniform(seed: u64) -> impl Fn(usize) -> f32 {
    move |i| {
        let mut x = (seed << 40 | i as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}
