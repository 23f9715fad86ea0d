//! Refusals are candle errors that name the argument and all shapes.

mod common;

use candle_core::{DType, Device, Error, Result, Tensor};
use common::tensor;
use headwise_candle::{Options, sdpa};

#[track_caller]
fn refused(q: &Tensor, k: &Tensor, v: &Tensor, options: &Options, parts: &[&str]) {
    let error: Error = sdpa(q, k, v, options).unwrap_err();
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
}

#[test]
fn shapes_and_types() -> Result<()> {
    let (q, k, v) = (tensor([2, 4, 3, 8], 1), tensor([2, 2, 5, 8], 2), tensor([2, 2, 5, 6], 3));
    let (plain, all) = (Options::new(), ["q [2, 4, 3, 8] over k [2, 2, 5, 8] and v [2, 2, 5, 6]"]);
    refused(&q.narrow(3, 0, 7)?, &k, &v, &plain, &["k has shape [2, 2, 5, 8]", "q [2, 4, 3, 7] over"]);
    refused(&q, &k.narrow(2, 0, 4)?, &v, &plain, &["v has shape", "k [2, 2, 4, 8] and v [2, 2, 5, 6]"]);
    refused(&q.narrow(1, 0, 3)?, &k, &v, &plain, &["3 query heads are not a multiple of 2"]);
    refused(&q, &k, &v, &Options::new().kv_lens([5, 6]), &["kv_lens[1] is 6", all[0]]);
    refused(&q, &k, &v, &Options::new().slopes([1.0]), &["slopes has 1 entries, expected 4", all[0]]);
    refused(&q, &k, &v, &Options::new().scale(f32::NAN), &["scale is NaN", all[0]]);
    let bias = Tensor::zeros((4, 5), DType::F32, &Device::Cpu)?;
    refused(&q, &k, &v, &Options::new().bias(&bias), &["bias of shape [1, 1, 4, 5]", "[2, 4, 3, 5]", all[0]]);
    let mask = Tensor::zeros((1, 2, 4, 3, 5), DType::U8, &Device::Cpu)?;
    refused(&q, &k, &v, &Options::new().mask(&mask), &["mask", "1 to 4 axes, not 5", all[0]]);
    refused(&q, &k, &v, &Options::new().mask(&bias), &["mask must be U8", all[0]]);

    refused(&q.squeeze(0)?.narrow(0, 0, 1)?.squeeze(0)?, &k, &v, &plain, &["q has shape [4, 3, 8]"]);
    refused(&q, &k.to_dtype(DType::F64)?, &v, &plain, &["v is F32, but k is F64"]);
    let [q, k, v] = [q, k, v].map(|tensor| tensor.to_dtype(DType::F64).unwrap());
    refused(&q, &k, &v, &plain, &["F64 is not supported", all[0]]);
    Ok(())
}
