//! The keys and values of sequences that grow: what a model keeps between its steps.

use std::ops::Range;

use headwise_kernels::{DType, Element, Error, Stored, View, ViewMut, convert};

/// The sizes of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    /// Sequences.
    pub batch: usize,
    /// Key/value heads.
    pub heads: usize,
    /// Tokens that each sequence has room for.
    pub capacity: usize,
    /// Features of a key.
    pub d: usize,
    /// Features of a value.
    pub dv: usize,
}

/// How a cache lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheLayout {
    /// `[B, Hk, capacity, D]`: the tokens of a head lie side by side, the fastest to read.
    #[default]
    HeadMajor,
    /// `[B, capacity, Hk, D]`: the heads of a token lie side by side, as projections write them.
    TokenMajor,
}

impl CacheLayout {
    fn strides(self, CacheShape { heads, capacity, .. }: CacheShape, features: usize) -> [isize; 4] {
        // No element has an index above 0 where a size is 0, so what the product is does not matter there.
        let stride = |sizes: &[usize]| sizes.iter().fold(1isize, |n, &size| n.saturating_mul(size as isize));
        let (head, token) = match self {
            CacheLayout::HeadMajor => (stride(&[capacity, features]), stride(&[features])),
            CacheLayout::TokenMajor => (stride(&[features]), stride(&[heads, features])),
        };
        [stride(&[heads, capacity, features]), head, token, 1]
    }
}

/// Groups of at most `group` features, as even as they can be: at least one.
fn groups(features: usize, group: usize) -> usize {
    let groups = features.div_ceil(group.max(1)).max(1);
    features.div_ceil(features.div_ceil(groups).max(1)).max(1)
}

/// What happens when a sequence needs more room than there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WhenFull {
    /// [`Error::Full`]; the cache stays as it was.
    #[default]
    Refuse,
    /// The cache moves to twice the room.
    Grow,
    /// The oldest tokens make room, but for the first `keep` (attention sinks: Xiao et al. 2024, "Efficient
    /// Streaming Language Models with Attention Sinks", section 3). Then positions are places in the cache:
    /// the last token always stands at the last key.
    Roll {
        /// Tokens at the start of each sequence that stay.
        keep: usize,
    },
}

/// Keys and values of a batch of sequences, each with a length of its own. The type may be another than the
/// model's: what is appended is rounded to it, and `i8` keeps a scale for each token and head, or for each
/// group of its features ([`KvCache::grouped`]): a quarter of the memory of f32 to read at every step, and
/// half of f16's.
///
/// ```
/// use headwise::{Attention, CacheShape, KvCache, View, ViewMut};
/// let mut cache = KvCache::<f32>::new(CacheShape { batch: 1, heads: 1, capacity: 8, d: 1, dv: 1 })?;
/// for step in 0..3 {
///     let (k, v) = ([0.0], [step as f32]);
///     cache.append(View::bhld(&k, [1, 1, 1, 1])?, View::bhld(&v, [1, 1, 1, 1])?)?;
/// }
/// let (q, mut out) = ([0.0], [0.0]);
/// let (q, out_view) = (View::bhld(&q, [1, 1, 1, 1])?, ViewMut::bhld(&mut out, [1, 1, 1, 1])?);
/// Attention::new().causal().run(q, cache.keys(), cache.values(), out_view)?;
/// assert_eq!(out, [1.0]); // the mean of 0, 1 and 2
/// # Ok::<(), headwise::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct KvCache<C> {
    shape: CacheShape,
    layout: CacheLayout,
    when_full: WhenFull,
    k: Vec<C>,
    v: Vec<C>,
    /// Of integers, the scales of K and V, and the features that share one.
    scales: [Vec<f32>; 2],
    group: usize,
    lens: Vec<usize>,
    appended: Vec<usize>,
    /// Of a rolling cache, where the oldest token of the ring lies, from the first place of the ring on.
    firsts: Vec<usize>,
}

impl<C: Stored> KvCache<C> {
    /// An empty cache, [`CacheLayout::HeadMajor`], that refuses more tokens than it has room for.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the sizes multiply to more than can be addressed.
    pub fn new(shape: CacheShape) -> Result<Self, Error> {
        Self::with(shape, CacheLayout::default(), WhenFull::default())
    }

    /// An empty cache of any kind.
    ///
    /// # Errors
    /// As [`KvCache::new`].
    pub fn with(shape: CacheShape, layout: CacheLayout, when_full: WhenFull) -> Result<Self, Error> {
        Self::grouped(shape, layout, when_full, usize::MAX)
    }

    /// As [`KvCache::with`], of an `i8` cache with a scale for each `group` features of a token and head (0
    /// as 1): nearer to what was appended, but for other groups than whole heads decoding is slower. Other
    /// types have no scales.
    ///
    /// What it costs in exactness, the largest error of attention: 1.2e-2 in the first layer of
    /// all-MiniLM-L6-v2 (values up to 3.3) with whole heads, and no less with groups of 16 or 8, as it is the
    /// values that err; where one feature of the keys is 20 times the others (values up to 1) 6.2e-3 with
    /// whole heads of 64, 3.5e-3 with groups of 32, 3.1e-3 with groups of 16.
    ///
    /// # Errors
    /// As [`KvCache::new`].
    pub fn grouped(
        shape: CacheShape,
        layout: CacheLayout,
        when_full: WhenFull,
        group: usize,
    ) -> Result<Self, Error> {
        let count = |features: usize, size: usize| {
            let CacheShape { batch, heads, capacity, .. } = shape;
            let sizes = [batch, heads, capacity, features];
            let count = sizes.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
            let count = count.filter(|&n| n <= isize::MAX as usize / size);
            let empty = sizes.contains(&0).then_some(0);
            empty.or(count).ok_or(Error::TooLarge { argument: "cache", shape: sizes })
        };
        let [k, v] = [shape.d, shape.dv].map(|features| count(features, size_of::<C>()));
        let (k, v) = (vec![C::default(); k?], vec![C::default(); v?]);
        let mut scales = [Vec::new(), Vec::new()];
        if C::DTYPE == DType::I8 {
            for (scales, features) in scales.iter_mut().zip([shape.d, shape.dv]) {
                *scales = vec![0.0; count(groups(features, group), size_of::<f32>())?];
            }
        }
        let zeros = vec![0; shape.batch];
        let (lens, appended, firsts) = (zeros.clone(), zeros.clone(), zeros);
        Ok(Self { shape, layout, when_full, k, v, scales, group, lens, appended, firsts })
    }

    /// The sizes; a growing cache has more capacity now than it began with.
    pub fn shape(&self) -> CacheShape {
        self.shape
    }

    /// Tokens held of each sequence.
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Tokens appended to each sequence and not truncated, of which a rolling cache may have let some go: the
    /// position of the next token.
    pub fn appended(&self) -> &[usize] {
        &self.appended
    }

    /// Bytes of keys, values and scales, whether in use or not.
    pub fn bytes(&self) -> usize {
        let scales: usize = self.scales.iter().map(|scales| size_of_val(scales.as_slice())).sum();
        size_of_val(self.k.as_slice()) + size_of_val(self.v.as_slice()) + scales
    }

    /// The keys for a call, `[B, Hk, capacity, D]`: the view knows the lengths. Nothing is copied.
    pub fn keys(&self) -> View<'_, C> {
        self.view(0)
    }

    /// The values for a call, `[B, Hk, capacity, Dv]`.
    pub fn values(&self) -> View<'_, C> {
        self.view(1)
    }

    /// Keys (0) or values (1).
    fn view(&self, side: usize) -> View<'_, C> {
        let (data, features) = [(&self.k, self.shape.d), (&self.v, self.shape.dv)][side];
        let mut view = self.strided(data, features);
        if C::DTYPE == DType::I8 {
            let scales = self.strided(&self.scales[side], groups(features, self.group));
            view = view.scaled(scales).expect("the cache's own sizes");
        }
        view.rolling(self.kept(), &self.firsts, &self.lens).expect("lengths within the capacity")
    }

    /// Places that do not roll.
    fn kept(&self) -> usize {
        let capacity = self.shape.capacity;
        if let WhenFull::Roll { keep } = self.when_full { keep.min(capacity) } else { capacity }
    }

    fn strides(&self, features: usize) -> [isize; 4] {
        self.layout.strides(self.shape, features)
    }

    /// Appends the keys `[B, Hk, n, D]` and values `[B, Hk, n, Dv]` of `n` new tokens to every sequence, or,
    /// if the views are packed, to each sequence as many as it has in them. A rolling cache keeps the last of
    /// them where there are more than it has room for.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Tokens`] if `k` and `v` do not fit the cache or each other,
    /// [`Error::Packed`] if they are paged or rolling, [`Error::Full`] if a sequence has no room for them;
    /// the cache stays as it was.
    pub fn append<T: Element>(&mut self, k: View<'_, T>, v: View<'_, T>) -> Result<(), Error> {
        let CacheShape { batch, heads, d, dv, .. } = self.shape;
        for (argument, view, features) in [("k", &k, d), ("v", &v, dv)] {
            let expected = [batch, heads, view.shape()[2], features];
            if view.shape() != expected {
                return Err(Error::Shape { argument, got: view.shape(), expected });
            }
        }
        for b in 0..batch {
            let (got, expected) = (v.len(b), k.len(b));
            if got != expected {
                return Err(Error::Tokens { argument: "v", b, got, expected });
            }
            if k.entry(b).is_none() || v.entry(b).is_none() {
                return Err(Error::Packed { shape: k.shape(), end: None });
            }
        }
        let (wanted, capacity) = (|b: usize| self.lens[b].saturating_add(k.len(b)), self.shape.capacity);
        match ((0..batch).find(|&b| wanted(b) > capacity), self.when_full) {
            (None, _) | (_, WhenFull::Roll { .. }) => {}
            (Some(_), WhenFull::Grow) => {
                let longest = (0..batch).map(wanted).max().unwrap_or(0);
                self.grow(longest.max(capacity.saturating_mul(2)))?;
            }
            (Some(b), WhenFull::Refuse) => {
                return Err(Error::Full { b, len: self.lens[b], more: k.len(b), capacity });
            }
        }
        for b in 0..batch {
            if let (Some(k), Some(v)) = (k.entry(b), v.entry(b)) {
                self.append_entry(b, k, v)?;
            }
        }
        Ok(())
    }

    /// Appends to one sequence, for which there is room.
    fn append_entry<T: Element>(&mut self, b: usize, k: View<'_, T>, v: View<'_, T>) -> Result<(), Error> {
        let (n, capacity, keep) = (k.len(0), self.shape.capacity, self.kept());
        let ring = capacity - keep;
        // The places that are free, in order, then the ring from its oldest token on.
        let mut next = n.min(capacity - self.lens[b]);
        self.write(b, self.lens[b], 0..next, k, v)?;
        self.lens[b] += next;
        self.appended[b] += n;
        if ring > 0 && n - next > ring {
            let skipped = n - next - ring; // they would be overwritten by those behind them
            self.firsts[b] = (self.firsts[b] + skipped) % ring;
            next += skipped;
        }
        while ring > 0 && next < n {
            let first = self.firsts[b];
            let some = (n - next).min(ring - first);
            self.write(b, keep + first, next..next + some, k, v)?;
            self.firsts[b] = (first + some) % ring;
            next += some;
        }
        Ok(())
    }

    /// Writes some of the new tokens to the places from `place` on.
    fn write<T: Element>(
        &mut self,
        b: usize,
        place: usize,
        tokens: Range<usize>,
        k: View<'_, T>,
        v: View<'_, T>,
    ) -> Result<(), Error> {
        let CacheShape { heads, d, dv, .. } = self.shape;
        // Offset, shape and strides of these places.
        let places = |features: usize| {
            let (shape, strides) = ([1, heads, tokens.len(), features], self.strides(features));
            let offset = b as isize * strides[0] + place as isize * strides[2];
            (if shape.contains(&0) { 0 } else { offset as usize }, shape, strides)
        };
        let at = [d, dv].map(|features| (places(features), places(groups(features, self.group))));
        let [k_scales, v_scales] = &mut self.scales;
        for ((data, scales, from), ((offset, shape, strides), of_scales)) in
            [(&mut self.k, k_scales, k), (&mut self.v, v_scales, v)].into_iter().zip(at)
        {
            let Some(from) = from.tokens(tokens.clone()) else { continue };
            let mut to = ViewMut::new(data, offset, shape, strides)?;
            if C::DTYPE == DType::I8 {
                let (offset, shape, strides) = of_scales;
                convert(from, &mut to, Some(&mut ViewMut::new(scales, offset, shape, strides)?))?;
            } else {
                convert(from, &mut to, None)?;
            }
        }
        Ok(())
    }

    /// Moves to another capacity, at least as long as what is held. A cache that grows does not roll.
    fn grow(&mut self, capacity: usize) -> Result<(), Error> {
        let shape = CacheShape { capacity, ..self.shape };
        let mut larger = Self::grouped(shape, self.layout, self.when_full, self.group)?;
        let CacheShape { d, dv, .. } = shape;
        self.copy_to(&mut larger.k, &self.k, d, capacity)?;
        self.copy_to(&mut larger.v, &self.v, dv, capacity)?;
        for ((to, from), features) in larger.scales.iter_mut().zip(&self.scales).zip([d, dv]) {
            if C::DTYPE == DType::I8 {
                self.copy_to(to, from, groups(features, self.group), capacity)?;
            }
        }
        larger.lens.clone_from(&self.lens);
        larger.appended.clone_from(&self.appended);
        *self = larger;
        Ok(())
    }

    /// Copies all places to those of a cache with another capacity.
    fn copy_to<E: Copy>(
        &self,
        to: &mut [E],
        from: &[E],
        features: usize,
        capacity: usize,
    ) -> Result<(), Error> {
        let (larger, CacheShape { batch, heads, .. }) = (CacheShape { capacity, ..self.shape }, self.shape);
        let shape = [batch, heads, self.shape.capacity, features];
        ViewMut::new(to, 0, shape, self.layout.strides(larger, features))?
            .copy_from(self.strided(from, features))
    }

    /// All places, in use or not.
    fn strided<'c, E>(&self, data: &'c [E], features: usize) -> View<'c, E> {
        let CacheShape { batch, heads, capacity, .. } = self.shape;
        let view = View::new(data, 0, [batch, heads, capacity, features], self.strides(features));
        view.expect("the cache's own sizes")
    }

    /// Forgets the tokens of sequence `b` behind the first `len`, as when speculation was rejected. Sequences
    /// that are shorter stay as they are.
    ///
    /// # Errors
    /// [`Error::BeyondAxis`] if there is no sequence `b`; [`Error::Rolled`] if tokens before these have made
    /// room for them: they cannot come back.
    pub fn truncate(&mut self, b: usize, len: usize) -> Result<(), Error> {
        let Some(&held) = self.lens.get(b) else {
            return Err(Error::BeyondAxis { argument: "b", index: 0, got: b, axis: self.shape.batch });
        };
        if len >= held {
            return Ok(());
        }
        if self.appended[b] > held {
            return Err(Error::Rolled { b, len });
        }
        (self.lens[b], self.appended[b]) = (len, len);
        Ok(())
    }

    /// Forgets all tokens of all sequences.
    pub fn clear(&mut self) {
        for list in [&mut self.lens, &mut self.appended, &mut self.firsts] {
            list.fill(0);
        }
    }
}
