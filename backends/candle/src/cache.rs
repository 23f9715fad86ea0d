//! Keys and values kept between the steps of a model, on headwise's cache.

use std::fmt::Debug;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Storage, Tensor, bail};
use headwise::{CacheLayout, CacheShape, Stored, WhenFull};

use crate::op::{ForType, NAME, Number, attend, for_type, on_cpu, refusal, stored};
use crate::options::Options;

/// The keys and values of a batch of sequences: `candle_nn::kv_cache::KvCache` and the attention over it in
/// one.
///
/// Sizes are those of the first keys and values, and the type too unless [`KvCache::stored_as`] names one.
/// Appending writes the new tokens only, attention reads the cache where it lies, and each sequence has a
/// length of its own. It is for inference: what asks for gradients is refused.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use headwise_candle::{KvCache, Options};
///
/// let mut cache = KvCache::new(1024); // tokens; it grows
/// for _step in 0..3 {
///     let q = Tensor::randn(0f32, 1., (1, 8, 1, 64), &Device::Cpu)?; // [B, Hq, n, D]
///     let k = Tensor::randn(0f32, 1., (1, 2, 1, 64), &Device::Cpu)?;
///     let v = Tensor::randn(0f32, 1., (1, 2, 1, 64), &Device::Cpu)?;
///     let y = cache.attend(&q, &k, &v, &Options::new().causal())?;
///     assert_eq!(y.dims(), [1, 8, 1, 64]);
/// }
/// assert_eq!(cache.lens(), [3]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct KvCache {
    capacity: usize,
    layout: CacheLayout,
    when_full: WhenFull,
    stored: Option<headwise::DType>,
    held: Option<Box<dyn Held>>,
}

impl Clone for KvCache {
    fn clone(&self) -> Self {
        Self { held: self.held.as_ref().map(|held| held.boxed()), ..*self }
    }
}

impl KvCache {
    /// An empty cache with room for `capacity` tokens a sequence, which grows.
    pub fn new(capacity: usize) -> Self {
        Self::with(capacity, CacheLayout::default(), WhenFull::Grow)
    }

    /// An empty cache of any kind.
    pub fn with(capacity: usize, layout: CacheLayout, when_full: WhenFull) -> Self {
        Self { capacity, layout, when_full, stored: None, held: None }
    }

    /// Keeps keys and values as `dtype`, whatever type they come in: rounded, or as `I8` with a scale for
    /// each token and head. Less memory to read at every step.
    pub fn stored_as(mut self, dtype: headwise::DType) -> Self {
        self.stored = Some(dtype);
        self
    }

    /// Appends the keys `[B, Hk, n, D]` and values `[B, Hk, n, Dv]` of `n` tokens to every sequence.
    /// Sequences of different lengths are appended padded behind and then [truncated](KvCache::truncate).
    ///
    /// # Errors
    /// If the shapes or types do not fit the cache or each other, if a tensor does not lie on the CPU or asks
    /// for gradients, or if there is no room; the cache stays as it was.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<()> {
        check([("k", k), ("v", v)])?;
        if v.dtype() != k.dtype() {
            bail!("{NAME}: v is {:?}, but k is {:?}", v.dtype(), k.dtype());
        }
        let appended = match &mut self.held {
            Some(held) => held.append(k, v),
            None => self.first(k, v).map(|held| self.held = Some(held)),
        };
        appended.map_err(|error| error.context(format!("appending k {:?} and v {:?}", k.dims(), v.dims())))
    }

    /// A cache for such tensors, with them in it.
    fn first(&self, k: &Tensor, v: &Tensor) -> Result<Box<dyn Held>> {
        let ((batch, heads, _, d), (.., dv)) = (k.dims4()?, v.dims4()?);
        let shape = CacheShape { batch, heads, capacity: self.capacity, d, dv };
        let stored = match (self.stored, k.dtype()) {
            (Some(stored), _) => stored,
            (None, DType::F16) => headwise::DType::F16,
            (None, DType::BF16) => headwise::DType::Bf16,
            (None, _) => headwise::DType::F32,
        };
        let mut held: Box<dyn Held> = match stored {
            headwise::DType::F32 => self.typed::<f32>(shape)?,
            headwise::DType::F16 => self.typed::<half::f16>(shape)?,
            headwise::DType::Bf16 => self.typed::<half::bf16>(shape)?,
            headwise::DType::I8 => self.typed::<i8>(shape)?,
            other => bail!("{NAME}: a cache of {other} is not supported"),
        };
        held.append(k, v)?;
        Ok(held)
    }

    fn typed<C: Stored>(&self, shape: CacheShape) -> Result<Box<dyn Held>> {
        let cache = headwise::KvCache::<C>::with(shape, self.layout, self.when_full).map_err(refusal)?;
        Ok(Box::new(Typed(cache)))
    }

    /// The attention of `q [B, Hq, n, D]` over the cache, `[B, Hq, n, Dv]`. By default the last query stands
    /// at the last token.
    ///
    /// # Errors
    /// As [`sdpa`](crate::sdpa), and if nothing has been appended.
    pub fn sdpa(&self, q: &Tensor, options: &Options) -> Result<Tensor> {
        check([("q", q)])?;
        let Some(held) = &self.held else {
            bail!("{NAME}: q of shape {:?} over a cache to which nothing has been appended", q.shape());
        };
        let out = held.sdpa(q, options).and_then(|out| out.transpose(1, 2));
        out.map_err(|error| error.context(format!("attention of q {:?} over {held:?}", q.dims())))
    }

    /// [`KvCache::append`], then [`KvCache::sdpa`]: a step of a model.
    ///
    /// # Errors
    /// As these two. If only the queries or the options are at fault, the keys and values have been appended.
    pub fn attend(&mut self, q: &Tensor, k: &Tensor, v: &Tensor, options: &Options) -> Result<Tensor> {
        check([("q", q)])?;
        self.append(k, v)?;
        self.sdpa(q, options)
    }

    /// Tokens held of each sequence; empty before the first ones.
    pub fn lens(&self) -> &[usize] {
        self.held.as_ref().map_or(&[], |held| held.lens())
    }

    /// Tokens appended to each sequence, of which a rolling cache may have let some go: the position of the
    /// next token.
    pub fn appended(&self) -> &[usize] {
        self.held.as_ref().map_or(&[], |held| held.appended())
    }

    /// Forgets the tokens of sequence `b` behind the first `len`: padding, or speculation that was rejected.
    ///
    /// # Errors
    /// If there is no sequence `b`, or if a rolling cache has let older tokens go.
    pub fn truncate(&mut self, b: usize, len: usize) -> Result<()> {
        match &mut self.held {
            Some(held) => held.truncate(b, len).map_err(refusal),
            None => bail!("{NAME}: sequence {b} of a cache to which nothing has been appended"),
        }
    }

    /// Forgets everything, sizes and type too.
    pub fn reset(&mut self) {
        self.held = None;
    }
}

fn check<const N: usize>(tensors: [(&str, &Tensor); N]) -> Result<()> {
    for (argument, tensor) in tensors {
        on_cpu(argument, tensor)?;
        if tensor.rank() != 4 {
            bail!("{NAME}: {argument} has shape {:?}, expected the axes [B, H, L, D]", tensor.shape());
        }
        if tensor.track_op() {
            bail!(
                "{NAME}: {argument} of shape {:?} asks for a gradient, which a cache does not have; detach() it",
                tensor.shape()
            );
        }
    }
    Ok(())
}

/// A cache of some type.
trait Held: Debug + Send + Sync {
    fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<()>;
    fn sdpa(&self, q: &Tensor, options: &Options) -> Result<Tensor>;
    fn lens(&self) -> &[usize];
    fn appended(&self) -> &[usize];
    fn truncate(&mut self, b: usize, len: usize) -> std::result::Result<(), headwise::Error>;
    fn boxed(&self) -> Box<dyn Held>;
}

#[derive(Clone)]
struct Typed<C>(headwise::KvCache<C>);

impl<C: Stored> Debug for Typed<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let CacheShape { batch, heads, capacity, d, dv } = self.0.shape();
        write!(f, "a cache [{batch}, {heads}, {capacity}, {d} and {dv}] of {}, tokens ", C::DTYPE)?;
        self.0.lens().fmt(f)
    }
}

impl<C: Stored> Held for Typed<C> {
    fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<()> {
        let ((k, k_layout), (v, v_layout)) = (k.storage_and_layout(), v.storage_and_layout());
        let (Storage::Cpu(k), Storage::Cpu(v)) = (&*k, &*v) else { bail!("{NAME}: not on the CPU") };
        for_type(k.dtype(), Append { cache: &mut self.0, k: (k, k_layout), v: (v, v_layout) })
    }

    fn sdpa(&self, q: &Tensor, options: &Options) -> Result<Tensor> {
        q.apply_op1_no_bwd(&Over { cache: &self.0, options })
    }

    fn lens(&self) -> &[usize] {
        self.0.lens()
    }

    fn appended(&self) -> &[usize] {
        self.0.appended()
    }

    fn truncate(&mut self, b: usize, len: usize) -> std::result::Result<(), headwise::Error> {
        self.0.truncate(b, len)
    }

    fn boxed(&self) -> Box<dyn Held> {
        Box::new(self.clone())
    }
}

/// Appending, once the type of what is new is known.
struct Append<'a, C> {
    cache: &'a mut headwise::KvCache<C>,
    k: (&'a CpuStorage, &'a Layout),
    v: (&'a CpuStorage, &'a Layout),
}

impl<C: Stored> ForType for Append<'_, C> {
    type Output = ();
    fn run<T: Number>(self) -> Result<()> {
        self.cache.append(stored::<T>(self.k)?, stored::<T>(self.v)?).map_err(refusal)
    }
}

/// Attention over a cache, as an operation on the queries.
struct Over<'a, C> {
    cache: &'a headwise::KvCache<C>,
    options: &'a Options,
}

impl<C: Stored> CustomOp1 for Over<'_, C> {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, q: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        struct Queries<'a, C>(&'a Over<'a, C>, &'a CpuStorage, &'a Layout);
        impl<C: Stored> ForType for Queries<'_, C> {
            type Output = (CpuStorage, Shape);
            fn run<T: Number>(self) -> Result<Self::Output> {
                let Queries(Over { cache, options }, q, layout) = self;
                attend(options, stored::<T>((q, layout))?, cache.keys(), cache.values())
            }
        }
        for_type(q.dtype(), Queries(self, q, layout))
    }
}
