//! Copies between element types: how keys and values come into a cache of another type than they were
//! computed in.
//!
//! ```text
//! f16, bf16   the nearest number, ties to even
//! i8          scale = max |x| / 127 over the features of a group;  x / scale to the nearest integer
//! ```

use crate::element::{Element, Stored};
use crate::view::features_per_scale;
use crate::{DType, Error, View, ViewMut};

/// Copies `from` to `to`, of the same shape, with the same tokens in every batch entry. Integers go with
/// `scales [B, H, L, G]`, one for each of `G` groups of features, as [`View::scaled`] reads them: where a
/// group holds NaN or an infinity its scale is NaN.
///
/// # Errors
/// [`Error::Shape`] or [`Error::Tokens`] if the shapes differ; [`Error::NoScales`] if integers have none,
/// [`Error::Scales`] if they do not fit.
pub fn convert<T: Element, C: Stored>(
    from: View<'_, T>,
    to: &mut ViewMut<'_, C>,
    scales: Option<&mut ViewMut<'_, f32>>,
) -> Result<(), Error> {
    to.expect_like(&from)?;
    let [b, h, _, d] = from.shape();
    let rows = (0..b).flat_map(|b| (0..h).flat_map(move |h| (0..from.len(b)).map(move |i| [b, h, i])));
    if C::DTYPE != DType::I8 {
        for [b, h, i] in rows {
            let (x, by_x, y, by_y) = (from.row(b, h, i), from.strides()[3], to.row(b, h, i), to.strides()[3]);
            if C::DTYPE == T::DTYPE && by_x == 1 && by_y == 1 {
                // SAFETY: as below, of the same type.
                unsafe { core::ptr::copy_nonoverlapping(x.cast(), y, d) };
                continue;
            }
            for c in 0..d as isize {
                // SAFETY: features of a row of each view; `to` is borrowed mutably, so they are apart.
                unsafe {
                    *y.wrapping_offset(c * by_y) = C::from_f32((*x.wrapping_offset(c * by_x)).to_f32())
                };
            }
        }
        return Ok(());
    }
    let scales = scales.ok_or(Error::NoScales { argument: "to" })?;
    if scales.starts().is_some() {
        return Err(Error::Scales { got: scales.shape(), view: from.shape() });
    }
    let (groups, per) = (scales.shape()[3], features_per_scale(from.shape(), scales.shape())?);
    for [b, h, i] in rows {
        let (x, by_x, y, by_y) = (from.row(b, h, i), from.strides()[3], to.row(b, h, i), to.strides()[3]);
        for group in 0..groups {
            let features = (group * per) as isize..((group + 1) * per).min(d) as isize;
            // SAFETY: as above; each group of a row has a scale.
            unsafe {
                let x = |c: isize| (*x.wrapping_offset(c * by_x)).to_f32();
                let (mut largest, mut zero) = (0.0f32, 0.0);
                for c in features.clone() {
                    largest = largest.max(x(c).abs());
                    zero += x(c) * 0.0;
                }
                let scale = if zero == 0.0 { largest / 127.0 } else { f32::NAN };
                // A scale that is no normal number would lose more than the numbers are worth.
                let scale = if scale < f32::MIN_POSITIVE { 0.0 } else { scale };
                let place = scales.row(b, h, i).wrapping_offset(group as isize * scales.strides()[3]);
                *place = scale;
                for c in features {
                    let x = if scale > 0.0 { x(c) / scale } else { 0.0 };
                    *y.wrapping_offset(c * by_y) = C::from_f32(x);
                }
            }
        }
    }
    Ok(())
}
