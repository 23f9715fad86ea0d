//! [headwise](https://docs.rs/headwise) attention on [`ndarray`] arrays.
//!
//! Arrays have the axes `[B, H, L, D]` (batch, heads, tokens, features). They may have any strides: slices,
//! permuted, reversed and broadcast arrays are read, and written, in place. Tokens outside the heads,
//! `[B, L, H, D]`, are `array.permuted_axes([0, 2, 1, 3])`.
//!
//! ```
//! use headwise_ndarray::{attention, headwise::Attention, ndarray::{Array4, s}};
//!
//! let q = Array4::from_shape_fn([2, 4, 5, 8], |(b, h, i, d)| ((b + h + i + d) as f32).sin());
//! let kv = Array4::from_shape_fn([2, 2, 5, 16], |(b, h, j, d)| ((b + h + j + d) as f32).cos());
//! let (k, v) = (kv.slice(s![.., .., .., ..8]), kv.slice(s![.., .., .., 8..])); // one array holds both
//!
//! let out = attention(&Attention::new().causal(), q.view(), k, v)?; // 4 query heads on 2
//! assert_eq!(out.dim(), (2, 4, 5, 8));
//! assert_eq!(out.slice(s![0, 0, 0, ..]), v.slice(s![0, 0, 0, ..])); // the first query sees the first key only
//! # Ok::<(), headwise_ndarray::headwise::Error>(())
//! ```
//!
//! Masks, biases and whatever else a call takes are set on [`headwise::Attention`]; [`view`] makes of an
//! array what it asks for:
//!
//! ```
//! use headwise_ndarray::{attention, headwise::Attention, ndarray::{Array2, Array4}, view};
//!
//! let x = Array4::<f32>::ones([1, 2, 3, 4]);
//! let mask = Array2::from_shape_fn([3, 3], |(i, j)| j <= i); // true = attend; broadcast over batch and heads
//! let out = attention(&Attention::new().mask(view(mask.view())?), x.view(), x.view(), x.view())?;
//! assert_eq!(out, x);
//! # Ok::<(), headwise_ndarray::headwise::Error>(())
//! ```
#![deny(unsafe_op_in_unsafe_fn)]

pub use {headwise, ndarray};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

use headwise::{Attention, Element, Error, Stored, View, ViewMut};
use ndarray::{Array3, Array4, ArrayView, ArrayView4, ArrayViewMut4, Dimension};

/// The attention of `q [B, Hq, Lq, D]` over `k [B, Hk, Lk, D]` and `v [B, Hk, Lk, Dv]` with the options of
/// `attention`, as a new array `[B, Hq, Lq, Dv]`.
///
/// # Errors
/// As [`Attention::run`].
pub fn attention<'a, T: Element, C: Stored>(
    attention: &Attention<'a>,
    q: ArrayView4<'a, T>,
    k: ArrayView4<'a, C>,
    v: ArrayView4<'a, C>,
) -> Result<Array4<T>, Error> {
    let (q, k, v) = (view(q)?, view(k)?, view(v)?);
    let mut out = zeros(attention, q, k, v)?;
    attention.run(q, k, v, view_mut(out.view_mut())?)?;
    Ok(out)
}

/// As [`attention`], into `out`, which may have any strides. Nothing is allocated for the result.
///
/// ```
/// use headwise_ndarray::{attention_into, headwise::Attention, ndarray::Array4};
///
/// let x = Array4::<f32>::ones([1, 3, 2, 4]);
/// let mut out = Array4::zeros([1, 2, 3, 4]); // tokens outside the heads
/// attention_into(&Attention::new(), x.view(), x.view(), x.view(), out.view_mut().permuted_axes([0, 2, 1, 3]))?;
/// assert_eq!(out, Array4::<f32>::ones([1, 2, 3, 4]));
/// # Ok::<(), headwise_ndarray::headwise::Error>(())
/// ```
///
/// # Errors
/// As [`Attention::run`].
pub fn attention_into<'a, T: Element, C: Stored>(
    attention: &Attention<'a>,
    q: ArrayView4<'a, T>,
    k: ArrayView4<'a, C>,
    v: ArrayView4<'a, C>,
    out: ArrayViewMut4<'_, T>,
) -> Result<(), Error> {
    attention.run(view(q)?, view(k)?, view(v)?, view_mut(out)?)
}

/// As [`attention`], and the natural logarithm of each row's softmax denominator, `[B, Hq, Lq]`.
///
/// # Errors
/// As [`Attention::run_with_lse`].
pub fn attention_with_lse<'a, T: Element, C: Stored>(
    attention: &Attention<'a>,
    q: ArrayView4<'a, T>,
    k: ArrayView4<'a, C>,
    v: ArrayView4<'a, C>,
) -> Result<(Array4<T>, Array3<f32>), Error> {
    let (q, k, v) = (view(q)?, view(k)?, view(v)?);
    let mut out = zeros(attention, q, k, v)?;
    let [b, hq, lq, _] = q.shape();
    let mut lse = Array3::zeros([b, hq, lq]);
    attention.run_with_lse(q, k, v, view_mut(out.view_mut())?, lse.as_slice_mut().unwrap_or_default())?;
    Ok((out, lse))
}

/// The array for the result, once the arguments have been checked.
fn zeros<'a, T: Element, C: Stored>(
    attention: &Attention<'a>,
    q: View<'a, T>,
    k: View<'a, C>,
    v: View<'a, C>,
) -> Result<Array4<T>, Error> {
    attention.plan(q, k, v)?;
    let ([b, hq, lq, _], [.., dv]) = (q.shape(), v.shape());
    Ok(Array4::default([b, hq, lq, dv]))
}

/// An array with up to four axes as headwise's view, padded on the left with axes of size 1. Nothing is
/// copied.
///
/// # Errors
/// [`Error::Rank`] for more than four axes.
pub fn view<'a, T, D: Dimension>(array: ArrayView<'a, T, D>) -> Result<View<'a, T>, Error> {
    let (shape, strides) = axes(array.shape(), array.strides())?;
    // SAFETY: the elements of the array, which is borrowed for 'a.
    unsafe { View::from_raw_parts(array.as_ptr(), shape, strides) }
}

/// A writable array as headwise's view. Nothing is copied.
///
/// # Errors
/// [`Error::Overlap`] for strides that interleave the axes, which ndarray's safe functions do not make.
pub fn view_mut<T>(mut array: ArrayViewMut4<'_, T>) -> Result<ViewMut<'_, T>, Error> {
    let (shape, strides) = axes(array.shape(), array.strides())?;
    // SAFETY: the elements of the array, which is borrowed mutably for as long as the view lives.
    unsafe { ViewMut::from_raw_parts(array.as_mut_ptr(), shape, strides) }
}

fn axes(sizes: &[usize], by: &[isize]) -> Result<([usize; 4], [isize; 4]), Error> {
    let pad = 4usize.checked_sub(sizes.len()).ok_or(Error::Rank { rank: sizes.len() })?;
    let (mut shape, mut strides) = ([1; 4], [0; 4]);
    shape[pad..].copy_from_slice(sizes);
    strides[pad..].copy_from_slice(by);
    Ok((shape, strides))
}
