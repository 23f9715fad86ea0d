//! The operation: candle's storage and layouts as headwise's views.

use std::fmt::Display;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, DType, Error, Layout, Result, Shape, Tensor, WithDType, bail};
use headwise::{View, ViewMut};

use crate::options::{Backward, Options};
use crate::plain;

/// The name in errors and in candle's graph.
pub(crate) const NAME: &str = "headwise-sdpa";

/// The attention of `q [B, Hq, Lq, D]` over `k [B, Hk, Lk, D]` and `v [B, Hk, Lk, Dv]`, `Hq` a multiple of
/// `Hk`: `[B, Hq, Lq, Dv]`, of the type of `q`. Rows that see no key come out as zeros.
///
/// The types are F32, F16 and BF16; `k` and `v` may have another than `q`. Scores, softmax and sums are f32.
/// The tensors are read where they lie. In the result the tokens lie outside the heads, so that `transpose(1,
/// 2)` and a `reshape` to `[B, Lq, Hq * Dv]`, the usual next step, copy nothing.
///
/// # Errors
/// If the shapes, types or devices do not fit each other or the options, or are not supported; the message
/// names the argument and the shapes. A backward pass through the result is an error unless
/// [`Options::backward`] says how.
pub fn sdpa(q: &Tensor, k: &Tensor, v: &Tensor, options: &Options) -> Result<Tensor> {
    check(q, k, v)?;
    if let Some(bias) = options.bias.as_ref().filter(|bias| bias.track_op()) {
        bail!(
            "{NAME}: bias of shape {:?} asks for a gradient, which is not supported; detach() it to go without",
            bias.shape()
        );
    }
    let out = q.apply_op3(k, v, Sdpa { options: options.clone() });
    out.and_then(|out| out.transpose(1, 2)).map_err(|error| with_shapes(error, q, k, v))
}

/// Checks what headwise does not see: types, devices and the number of axes.
fn check(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<()> {
    for (argument, tensor) in [("q", q), ("k", k), ("v", v)] {
        on_cpu(argument, tensor)?;
        if tensor.rank() != 4 {
            bail!("{NAME}: {argument} has shape {:?}, expected the axes [B, H, L, D]", tensor.shape());
        }
    }
    if v.dtype() != k.dtype() {
        bail!("{NAME}: v is {:?}, but k is {:?}", v.dtype(), k.dtype());
    }
    Ok(())
}

/// Refuses tensors on other devices.
pub(crate) fn on_cpu(argument: &str, tensor: &Tensor) -> Result<()> {
    match tensor.device().location() {
        candle_core::DeviceLocation::Cpu => Ok(()),
        device => bail!("{NAME}: {argument} lies on {device:?}; headwise computes on the CPU only"),
    }
}

pub(crate) fn refusal(error: impl Display) -> Error {
    Error::Msg(format!("{NAME}: {error}")).bt()
}

fn with_shapes(error: Error, q: &Tensor, k: &Tensor, v: &Tensor) -> Error {
    let [q, k, v] = [q, k, v].map(|tensor| tensor.dims().to_vec());
    error.context(format!("attention of q {q:?} over k {k:?} and v {v:?}"))
}

/// What candle and headwise both know as an element type.
pub(crate) trait Number: headwise::Element + WithDType {}
impl<T: headwise::Element + WithDType> Number for T {}

/// Something to do for whatever type a tensor has.
pub(crate) trait ForType {
    type Output;
    fn run<T: Number>(self) -> Result<Self::Output>;
}

/// Does it for `dtype`.
pub(crate) fn for_type<W: ForType>(dtype: DType, work: W) -> Result<W::Output> {
    match dtype {
        DType::F32 => work.run::<f32>(),
        DType::F16 => work.run::<half::f16>(),
        DType::BF16 => work.run::<half::bf16>(),
        other => bail!("{NAME}: {other:?} is not supported; the types are F32, F16 and BF16"),
    }
}

struct Sdpa {
    options: Options,
}

/// A storage and how a tensor lies in it.
type Stored<'a> = (&'a CpuStorage, &'a Layout);

impl CustomOp3 for Sdpa {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (keys, values) = ((k, k_layout), (v, v_layout));
        for_type(q.dtype(), Queries { options: &self.options, q: (q, q_layout), kv: [keys, values] })
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        if self.options.backward == Backward::Refuse {
            bail!(
                "backward is not supported for {NAME} (q {:?}, k {:?}, v {:?}) as called; \
                 Options::backward(Backward::Plain) lets candle differentiate the plain form",
                q.shape(),
                k.shape(),
                v.shape()
            );
        }
        let [q, k, v] = plain::gradients([q, k, v], &grad.transpose(1, 2)?, &self.options)?;
        Ok((Some(q), Some(k), Some(v)))
    }
}

/// The call, once the type of the queries is known.
struct Queries<'a> {
    options: &'a Options,
    q: Stored<'a>,
    kv: [Stored<'a>; 2],
}

impl ForType for Queries<'_> {
    type Output = (CpuStorage, Shape);
    fn run<T: Number>(self) -> Result<Self::Output> {
        let q = stored::<T>(self.q)?;
        for_type(self.kv[0].0.dtype(), KeysAndValues { options: self.options, q, kv: self.kv })
    }
}

/// The call, once the type of the keys and values is known, too.
struct KeysAndValues<'a, T> {
    options: &'a Options,
    q: View<'a, T>,
    kv: [Stored<'a>; 2],
}

impl<T: Number> ForType for KeysAndValues<'_, T> {
    type Output = (CpuStorage, Shape);
    fn run<C: Number>(self) -> Result<Self::Output> {
        let [k, v] = self.kv;
        attend(self.options, self.q, stored::<C>(k)?, stored::<C>(v)?)
    }
}

/// A stored tensor as a view. Nothing is copied.
pub(crate) fn stored<T: Number>((storage, layout): Stored<'_>) -> Result<View<'_, T>> {
    view(storage.as_slice()?, layout).map_err(refusal)
}

/// A tensor with up to four axes as a view, padded on the left with axes of size 1.
pub(crate) fn view<'a, T>(
    data: &'a [T],
    layout: &Layout,
) -> std::result::Result<View<'a, T>, headwise::Error> {
    let (dims, by) = (layout.dims(), layout.stride());
    let pad = 4usize.checked_sub(dims.len()).ok_or(headwise::Error::Rank { rank: dims.len() })?;
    let (mut shape, mut strides) = ([1; 4], [0; 4]);
    shape[pad..].copy_from_slice(dims);
    for (stride, &by) in strides[pad..].iter_mut().zip(by) {
        *stride = isize::try_from(by).unwrap_or(isize::MAX); // of an axis that leads nowhere
    }
    View::new(data, layout.start_offset(), shape, strides)
}

/// One call; the result has the axes `[B, Lq, Hq, Dv]`.
pub(crate) fn attend<T: Number, C: headwise::Stored>(
    options: &Options,
    q: View<'_, T>,
    k: View<'_, C>,
    v: View<'_, C>,
) -> Result<(CpuStorage, Shape)> {
    let ([b, hq, lq, _], [.., dv]) = (q.shape(), v.shape());
    let out = options.with(q, [k, v], |attention, q, [k, v]| {
        attention.plan(q, k, v)?; // before there is memory for the result
        let mut out = vec![T::default(); b * lq * hq * dv];
        attention.run(q, k, v, ViewMut::blhd(&mut out, [b, lq, hq, dv])?)?;
        Ok(out)
    })?;
    Ok((T::to_cpu_storage_owned(out), Shape::from((b, lq, hq, dv))))
}
