//! The textbook way, which the bench compares with: for every head
//!
//! ```text
//! S = scale * Q Kᵀ        by gemm
//! P = softmax(S)          row by row
//! O = P V                 by gemm
//! ```
//!
//! Heads are shared between the threads of the current pool. Each thread has one matrix of scores, which
//! stays for the next call; exp is that of the kernel for few rows. Causal computes all of S, as gemm must, and
//! exp of the visible part.
#![allow(unsafe_code, reason = "gemm takes pointers")]

use std::sync::{Mutex, PoisonError};

use headwise::Level;
use rayon::prelude::*;

use crate::Failure;
use crate::bench::{Buffer, Shape};

/// The baseline with its matrices of scores: as many as there were threads at work at once.
#[derive(Default)]
pub(crate) struct Baseline {
    scores: Mutex<Vec<Buffer>>,
}

impl Baseline {
    /// `q`, `k`, `v` and `out` are compact and of the sizes of `shape`; `exp` runs at `level`.
    pub fn run(
        &self,
        shape: &Shape,
        level: Level,
        [q, k, v]: [&[f32]; 3],
        out: &mut [f32],
    ) -> Result<(), Failure> {
        let &Shape { hq, hk, lq, lk, d, causal, .. } = shape;
        out.par_chunks_mut(lq * d).enumerate().try_for_each(|(head, out)| {
            let (b, h) = (head / hq, head % hq);
            let kv = (b * hk + h / (hq / hk)) * lk * d;
            let (q, k, v) = (&q[head * lq * d..][..lq * d], &k[kv..][..lk * d], &v[kv..][..lk * d]);
            let spare = self.lock().pop().filter(|spare| spare.len() >= lq * lk);
            let mut buffer = spare.map_or_else(|| Buffer::new(lq * lk, |_| 0.0), Ok)?;
            let scores = &mut buffer[..lq * lk];
            let scale = 1.0 / (d as f32).sqrt();
            product([lq, d, lk], scores, q, Right { data: k, column: d, row: 1 }, scale);
            for (i, row) in scores.chunks_exact_mut(lk).enumerate() {
                let (visible, hidden) = row.split_at_mut(if causal { i + 1 + lk - lq } else { lk });
                softmax(level, visible);
                hidden.fill(0.0);
            }
            product([lq, lk, d], out, scores, Right { data: v, column: 1, row: d }, 1.0);
            self.lock().push(buffer);
            Ok(())
        })
    }

    /// The matrices of scores that `threads` threads work on: the allocator does not see them.
    pub fn score_bytes(shape: &Shape, threads: usize) -> usize {
        threads.min(shape.b * shape.hq) * shape.lq * shape.lk * size_of::<f32>()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Buffer>> {
        self.scores.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lanes that the compiler turns into vectors of whatever size.
const LANES: usize = 16;

fn softmax(level: Level, row: &mut [f32]) {
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let max = fold(row, f32::NEG_INFINITY, larger);
    row.iter_mut().for_each(|x| *x -= max);
    headwise_kernels::exp(level, row).expect("the bench has checked that the level is available");
    let inverse = 1.0 / fold(row, 0.0, |a, b| a + b);
    row.iter_mut().for_each(|x| *x *= inverse);
}

fn fold(row: &[f32], neutral: f32, f: impl Fn(f32, f32) -> f32) -> f32 {
    let (blocks, tail) = row.as_chunks::<LANES>();
    let mut lanes = [neutral; LANES];
    for block in blocks {
        for (lane, &x) in lanes.iter_mut().zip(block) {
            *lane = f(*lane, x);
        }
    }
    lanes.iter().chain(tail).fold(neutral, |a, &x| f(a, x))
}

/// The right operand of a product and the strides of its columns and rows.
struct Right<'a> {
    data: &'a [f32],
    column: usize,
    row: usize,
}

/// `dst [m, n] = factor * lhs [m, k] * rhs [k, n]`, `dst` and `lhs` compact, in the order `[m, k, n]`.
fn product([m, k, n]: [usize; 3], dst: &mut [f32], lhs: &[f32], rhs: Right<'_>, factor: f32) {
    assert!(dst.len() == m * n && lhs.len() == m * k, "compact operands");
    let reach = k.saturating_sub(1) * rhs.row + n.saturating_sub(1) * rhs.column;
    assert!(reach < rhs.data.len(), "the right operand lies inside its slice");
    // SAFETY: `dst` and `lhs` have exactly the elements that their compact strides reach, the last element of
    // `rhs` lies inside its slice, and `dst` is borrowed mutably, so that it overlaps neither.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            1,
            n as isize,
            false,
            lhs.as_ptr(),
            1,
            k as isize,
            rhs.data.as_ptr(),
            rhs.column as isize,
            rhs.row as isize,
            0.0,
            factor,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
