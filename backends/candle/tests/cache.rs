//! A cache gives what attention over all tokens at once gives.

mod common;

use candle_core::{DType, Result, Tensor};
use common::{difference, numbers, tensor};
use headwise_candle::headwise::{CacheLayout, WhenFull};
use headwise_candle::{KvCache, Options, sdpa};

fn close(got: &Tensor, want: &Tensor) {
    assert_eq!(got.dims(), want.dims());
    let error = difference(&numbers(got), numbers(want).into_iter().map(f64::from));
    assert!(error < 2e-6, "{error}");
}

#[test]
fn prompt_and_steps() -> Result<()> {
    let (q, k, v) = (tensor([2, 6, 40, 16], 1), tensor([2, 2, 40, 16], 2), tensor([2, 2, 40, 24], 3));
    let options = Options::new().causal();
    let want = sdpa(&q, &k, &v, &options)?;
    for layout in [CacheLayout::HeadMajor, CacheLayout::TokenMajor] {
        for (capacity, when_full) in [(64, WhenFull::Refuse), (3, WhenFull::Grow), (0, WhenFull::Grow)] {
            let mut cache = KvCache::with(capacity, layout, when_full);
            assert!(cache.lens().is_empty());
            let mut start = 0;
            for n in [20, 1, 1, 7, 1, 10] {
                let part = |tensor: &Tensor| tensor.narrow(2, start, n);
                let got = cache.attend(&part(&q)?, &part(&k)?, &part(&v)?, &options)?;
                close(&got, &want.narrow(2, start, n)?);
                start += n;
                assert_eq!(cache.lens(), [start; 2]);
            }
        }
    }
    Ok(())
}

#[test]
fn sequences_of_different_lengths() -> Result<()> {
    let (q, k, v) = (tensor([2, 4, 9, 8], 1), tensor([2, 2, 9, 8], 2), tensor([2, 2, 9, 8], 3));
    let options = Options::new().causal();
    let mut cache = KvCache::new(16);
    let part = |tensor: &Tensor, start, n| tensor.narrow(2, start, n);
    cache.append(&part(&k, 0, 8)?, &part(&v, 0, 8)?)?; // the second is padded from 5 tokens
    cache.truncate(1, 5)?;
    assert_eq!(cache.lens(), [8, 5]);
    let mut other = cache.clone();
    let got = cache.attend(&part(&q, 8, 1)?, &part(&k, 8, 1)?, &part(&v, 8, 1)?, &options)?;
    close(&got.narrow(0, 0, 1)?, &sdpa(&q, &k, &v, &options)?.narrow(0, 0, 1)?.narrow(2, 8, 1)?);
    let without_padding =
        |tensor: &Tensor| Tensor::cat(&[part(tensor, 0, 5)?, part(tensor, 8, 1)?], 2)?.narrow(0, 1, 1);
    let want =
        sdpa(&part(&q, 8, 1)?.narrow(0, 1, 1)?, &without_padding(&k)?, &without_padding(&v)?, &options)?;
    close(&got.narrow(0, 1, 1)?, &want);

    assert_eq!((cache.lens(), other.lens()), (&[9, 6][..], &[8, 5][..])); // a clone is its own
    other.reset();
    assert!(other.lens().is_empty());
    other.append(&tensor([1, 3, 2, 4], 4), &tensor([1, 3, 2, 4], 5))?; // of another size now
    assert_eq!(other.lens(), [2]);
    Ok(())
}

#[test]
fn rolling() -> Result<()> {
    let (q, k, v) = (tensor([1, 4, 30, 8], 1), tensor([1, 2, 30, 8], 2), tensor([1, 2, 30, 8], 3));
    let mut cache = KvCache::with(8, CacheLayout::HeadMajor, WhenFull::Roll { keep: 2 });
    for i in 0..30 {
        let one = |tensor: &Tensor| tensor.narrow(2, i, 1);
        let got = cache.attend(&one(&q)?, &one(&k)?, &one(&v)?, &Options::new().causal())?;
        let held = |tensor: &Tensor| match i {
            0..8 => tensor.narrow(2, 0, i + 1),
            _ => Tensor::cat(&[tensor.narrow(2, 0, 2)?, tensor.narrow(2, i - 5, 6)?], 2),
        };
        close(&got, &sdpa(&one(&q)?, &held(&k)?, &held(&v)?, &Options::new())?);
    }
    assert_eq!((cache.lens(), cache.appended()), (&[8][..], &[30][..]));
    assert!(cache.truncate(0, 4).unwrap_err().to_string().contains("sequence 0 has rolled"));
    Ok(())
}

#[test]
fn refused() -> Result<()> {
    let mut cache = KvCache::with(4, CacheLayout::HeadMajor, WhenFull::Refuse);
    let (k, v) = (tensor([1, 2, 3, 8], 1), tensor([1, 2, 3, 6], 2));
    let message = cache.sdpa(&k, &Options::new()).unwrap_err().to_string();
    assert!(message.contains("[1, 2, 3, 8]") && message.contains("nothing has been appended"), "{message}");
    assert!(cache.truncate(0, 0).is_err());
    for (wrong_k, wrong_v) in [(k.clone(), tensor([1, 2, 4, 6], 3)), (k.clone(), tensor([1, 1, 3, 6], 3))] {
        let message = cache.append(&wrong_k, &wrong_v).unwrap_err().to_string();
        assert!(
            message.contains("[1, 2, 3, 8]") && message.contains(&format!("{:?}", wrong_v.dims())),
            "{message}"
        );
        assert!(cache.lens().is_empty());
    }
    assert!(
        cache
            .append(&k, &v.to_dtype(DType::F64)?)
            .unwrap_err()
            .to_string()
            .contains("v is F64, but k is F32")
    );
    cache.append(&k, &v)?;
    let message = cache.append(&k, &v).unwrap_err().to_string();
    assert!(message.contains("holds 3 tokens and has no room for 3 more, of 4"), "{message}");
    assert!(cache.append(&k.squeeze(0)?, &v).unwrap_err().to_string().contains("k has shape [2, 3, 8]"));
    let message = cache.sdpa(&k.to_dtype(DType::F64)?, &Options::new()).unwrap_err().to_string();
    assert!(message.contains("F64 is not supported"), "{message}");
    let message = cache.sdpa(&tensor([1, 3, 1, 8], 1), &Options::new()).unwrap_err().to_string();
    assert!(message.contains("3 query heads are not a multiple of 2"), "{message}");
    assert!(message.contains("[1, 3, 1, 8]") && message.contains("[1, 2, 4, 8 and 6]"), "{message}");
    assert!(cache.truncate(1, 0).unwrap_err().to_string().contains("b[0] is 1"));
    assert_eq!(cache.lens(), [3]);
    Ok(())
}
