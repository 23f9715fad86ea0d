//! The layer: its sizes, its parts, its forward passes.

use headwise_kernels::{Error, Stored, Then, View, ViewMut};

use super::Workspace;
use super::linear::{Linear, project};
use super::norm::Norm;
use super::prune::HeadGroup;
use super::rotary::Rotary;
use super::tokens::{Tokens, buffer};
use crate::attention::resolve_level;
use crate::plan::{self, Run};
use crate::{Attention, KvCache};

/// The sizes of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MultiHeadConfig {
    /// Features of a token that goes in, as a query.
    pub d_model: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads: `heads` is a multiple of it (Ainslie et al. 2023, "GQA"), unless query heads were
    /// pruned unevenly ([`MultiHead::groups`]).
    pub kv_heads: usize,
    /// Features of a query or key of one head.
    pub d_k: usize,
    /// Features of a value of one head.
    pub d_v: usize,
    /// Features of a token that goes in as a key.
    pub key_width: usize,
    /// Features of a token that goes in as a value.
    pub value_width: usize,
    /// Features of a token that comes out.
    pub d_out: usize,
}

impl MultiHeadConfig {
    /// `heads` heads that split `d_model` features (the rest of a division is left out), each with a
    /// key/value head of its own. Struct update syntax changes what differs.
    pub fn new(d_model: usize, heads: usize) -> Self {
        let d = d_model.checked_div(heads).unwrap_or(0);
        Self {
            d_model,
            heads,
            kv_heads: heads,
            d_k: d,
            d_v: d,
            key_width: d_model,
            value_width: d_model,
            d_out: d_model,
        }
    }
}

/// Multi-head attention with its projections: see the [module](super).
#[derive(Debug, Clone)]
pub struct MultiHead {
    pub(super) config: MultiHeadConfig,
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    pub(super) out: Linear,
    q_norm: Option<Norm>,
    k_norm: Option<Norm>,
    rotary: Option<Rotary>,
    scale: Option<f32>,
    /// Query heads of each key/value head, none 0.
    pub(super) groups: Vec<usize>,
    /// The query heads that are left, by their numbers in the layer as it was made.
    pub(super) kept: Vec<usize>,
    /// Query heads of the layer as it was made.
    pub(super) made_with: usize,
}

impl MultiHead {
    /// A layer of its projections: `q` from `d_model` to `heads * d_k` features, `k` from `key_width` to
    /// `kv_heads * d_k`, `v` from `value_width` to `kv_heads * d_v`, `out` from `heads * d_v` to `d_out`.
    ///
    /// # Errors
    /// [`Error::Heads`] if `heads` is not a multiple of `kv_heads`, [`Error::Shape`] if a projection has
    /// other sizes (the last two axes are inputs and outputs).
    pub fn new(config: MultiHeadConfig, q: Linear, k: Linear, v: Linear, out: Linear) -> Result<Self, Error> {
        let MultiHeadConfig { heads, kv_heads, .. } = config;
        if (kv_heads == 0 && heads > 0) || (kv_heads > 0 && !heads.is_multiple_of(kv_heads)) {
            return Err(Error::Heads { query: heads, key: kv_heads });
        }
        let mut layer = Self::of_parts(config, [q, k, v, out])?;
        layer.groups = vec![heads.checked_div(kv_heads).unwrap_or(0); kv_heads];
        Ok(layer)
    }

    /// A layer of its projections whose groups are yet to be said.
    pub(super) fn of_parts(config: MultiHeadConfig, [q, k, v, out]: [Linear; 4]) -> Result<Self, Error> {
        let MultiHeadConfig { d_model, heads, kv_heads, d_k, d_v, key_width, value_width, d_out } = config;
        let width = |heads: usize, d: usize| {
            heads.checked_mul(d).ok_or(Error::TooLarge { argument: "heads", shape: [1, 1, heads, d] })
        };
        let expected = [
            ("q", &q, d_model, width(heads, d_k)?),
            ("k", &k, key_width, width(kv_heads, d_k)?),
            ("v", &v, value_width, width(kv_heads, d_v)?),
            ("out", &out, width(heads, d_v)?, d_out),
        ];
        for (argument, linear, inputs, outputs) in expected {
            let (got, expected) = ([1, 1, linear.inputs(), linear.outputs()], [1, 1, inputs, outputs]);
            if got != expected {
                return Err(Error::Shape { argument, got, expected });
            }
        }
        let (groups, kept, made_with) = (Vec::new(), (0..heads).collect(), heads);
        let (q_norm, k_norm, rotary, scale) = (None, None, None, None);
        Ok(Self { config, q, k, v, out, q_norm, k_norm, rotary, scale, groups, kept, made_with })
    }

    /// Norms of queries and keys before they turn: over the features of a head (`d_k` of them, as in Qwen 3)
    /// or of all heads (`heads * d_k`, as in OLMo 2).
    ///
    /// # Errors
    /// [`Error::Length`] if a norm has another number of features.
    pub fn with_norms(mut self, q_norm: Option<Norm>, k_norm: Option<Norm>) -> Result<Self, Error> {
        let all = [("q_norm", &q_norm, self.q.outputs()), ("k_norm", &k_norm, self.k.outputs())];
        for (argument, norm, whole) in all {
            match norm.as_ref().map(Norm::features) {
                Some(got) if got != self.config.d_k && got != whole => {
                    return Err(Error::Length { argument, got, expected: self.config.d_k });
                }
                _ => {}
            }
        }
        (self.q_norm, self.k_norm) = (q_norm, k_norm);
        Ok(self)
    }

    /// Rotary positions for queries and keys.
    ///
    /// # Errors
    /// [`Error::BeyondAxis`] if more features turn than a head has.
    pub fn with_rotary(mut self, rotary: Rotary) -> Result<Self, Error> {
        let (got, axis) = (rotary.width(), self.config.d_k);
        if got > axis {
            return Err(Error::BeyondAxis { argument: "rotary width", index: 0, got, axis });
        }
        self.rotary = Some(rotary);
        Ok(self)
    }

    /// The factor on `<q, k>` where a call's [`Attention`] names none; without it `1/sqrt(d_k)`.
    pub fn with_scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// The sizes.
    pub fn config(&self) -> MultiHeadConfig {
        self.config
    }

    /// The projections of queries, keys, values, and of the result.
    pub fn linears(&self) -> [&Linear; 4] {
        [&self.q, &self.k, &self.v, &self.out]
    }

    /// The norms of queries and keys.
    pub fn norms(&self) -> [Option<&Norm>; 2] {
        [self.q_norm.as_ref(), self.k_norm.as_ref()]
    }

    /// The rotary positions.
    pub fn rotary(&self) -> Option<&Rotary> {
        self.rotary.as_ref()
    }

    /// The factor on `<q, k>`, if it is not `1/sqrt(d_k)`.
    pub fn scale(&self) -> Option<f32> {
        self.scale
    }

    /// Self-attention: `x [rows, d_model]` into `out [rows, d_out]`. What hides keys, and where it runs, is
    /// said by `attention`, for each call.
    ///
    /// # Errors
    /// Those of [`Attention::run`]; [`Error::Length`] if `x` or `out` does not fit, or if keys or values take
    /// tokens of another width than queries.
    pub fn forward(
        &self,
        x: Tokens<'_>,
        attention: &Attention<'_>,
        workspace: &mut Workspace,
        out: &mut [f32],
    ) -> Result<(), Error> {
        self.run([x, x, x], None::<&mut KvCache<f32>>, attention, Then::Store, workspace, out)
    }

    /// Cross-attention: the queries of `x [rows, d_model]` on `keys [rows, key_width]` and `values [rows,
    /// value_width]`, which have the same sequences, as many as `x`.
    ///
    /// # Errors
    /// As [`MultiHead::forward`].
    pub fn forward_cross(
        &self,
        x: Tokens<'_>,
        keys: Tokens<'_>,
        values: Tokens<'_>,
        attention: &Attention<'_>,
        workspace: &mut Workspace,
        out: &mut [f32],
    ) -> Result<(), Error> {
        self.run([x, keys, values], None::<&mut KvCache<f32>>, attention, Then::Store, workspace, out)
    }

    /// Self-attention over what the cache holds and `x`, which is appended to it: a prompt, a part of one, or
    /// one token of each sequence. Give `attention` as `causal()`: its default position is at the end of the
    /// cache. Rotary positions go on where the cache ends.
    ///
    /// # Errors
    /// As [`MultiHead::forward`] and [`KvCache::append`]; the cache stays as it was, unless it had to let
    /// tokens go for the new ones.
    pub fn forward_cached<C: Stored>(
        &self,
        x: Tokens<'_>,
        cache: &mut KvCache<C>,
        attention: &Attention<'_>,
        workspace: &mut Workspace,
        out: &mut [f32],
    ) -> Result<(), Error> {
        self.run([x, x, x], Some(cache), attention, Then::Store, workspace, out)
    }

    pub(crate) fn run<C: Stored>(
        &self,
        [x, keys, values]: [Tokens<'_>; 3],
        cache: Option<&mut KvCache<C>>,
        attention: &Attention<'_>,
        then: Then<'_>,
        workspace: &mut Workspace,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let MultiHeadConfig { d_model, heads, kv_heads, d_k, d_v, key_width, value_width, d_out } =
            self.config;
        let on = attention.runs_on();
        x.check("x", d_model)?;
        keys.check("keys", key_width)?;
        values.check("values", value_width)?;
        if x.rows().checked_mul(d_out) != Some(out.len()) {
            let expected = x.rows().saturating_mul(d_out);
            return Err(Error::Length { argument: "out", got: out.len(), expected });
        }
        if cache.as_ref().is_some_and(|cache| cache.lens().len() != x.batch()) {
            let (got, expected) = (x.batch(), cache.map_or(0, |cache| cache.lens().len()));
            return Err(Error::Length { argument: "x", got, expected });
        }
        let Workspace { q, k, v, heads: joined, scratch, .. } = workspace;
        let q = buffer(q, x.rows(), heads * d_k)?;
        let k = buffer(k, keys.rows(), kv_heads * d_k)?;
        let v = buffer(v, values.rows(), kv_heads * d_v)?;
        let joined = buffer(joined, x.rows(), heads * d_v)?;
        project(
            on,
            Some(scratch),
            [
                self.q.job(x.data(), Then::Store, q),
                self.k.job(keys.data(), Then::Store, k),
                self.v.job(values.data(), Then::Store, v),
            ],
        )?;
        let first = |b: usize| cache.as_ref().map_or(0, |cache| cache.appended()[b]);
        self.turn(on, x, self.q_norm.as_ref(), first, q)?;
        self.turn(on, keys, self.k_norm.as_ref(), first, k)?;

        let attention = self.attention(attention).scratch(scratch);
        let (k, v) = (keys.view(k, kv_heads, d_k)?, values.view(v, kv_heads, d_v)?);
        let to = x.view_mut(joined, heads, d_v)?;
        let q = x.view(q, heads, d_k)?;
        match cache {
            None => self.attend(&attention, q, k, v, to)?,
            Some(cache) => {
                cache.append(k, v)?;
                if let Err(error) = self.attend(&attention, q, cache.keys(), cache.values(), to) {
                    for b in 0..x.batch() {
                        let _ = cache.truncate(b, cache.lens()[b] - x.len(b).min(cache.lens()[b]));
                    }
                    return Err(error);
                }
            }
        }
        project(on, Some(scratch), [self.out.job(joined, then, out)])
    }

    /// The attention of all heads. Where pruning has left more query heads on some key/value heads than on
    /// others, each run of equal groups is a call of its own.
    fn attend<'a, C: Stored>(
        &self,
        attention: &Attention<'a>,
        q: View<'a, f32>,
        k: View<'a, C>,
        v: View<'a, C>,
        mut to: ViewMut<'_, f32>,
    ) -> Result<(), Error> {
        if self.groups.windows(2).all(|two| two[0] == two[1]) {
            return attention.run(q, k, v, to);
        }
        let [b, heads, queries, _] = q.shape();
        let weights = [b, heads, queries, k.shape()[2]];
        for HeadGroup { heads, kv_heads } in self.groups() {
            let some = attention.of_heads(&heads, weights)?;
            let (k, v) = (k.heads(kv_heads.clone())?, v.heads(kv_heads)?);
            some.run(q.heads(heads.clone())?, k, v, to.heads(heads)?)?;
        }
        Ok(())
    }

    /// Norm and rotary positions of queries or keys, in place.
    fn turn(
        &self,
        on: Run,
        tokens: Tokens<'_>,
        norm: Option<&Norm>,
        first: impl Fn(usize) -> usize + Sync,
        x: &mut [f32],
    ) -> Result<(), Error> {
        if let Some(norm) = norm {
            norm.in_place(x, on)?;
        }
        let Some(rotary) = &self.rotary else { return Ok(()) };
        let (level, width, d) =
            (resolve_level(on.level)?, x.len().checked_div(tokens.rows()).unwrap_or(0), self.config.d_k);
        let threads = plan::threads_for(on.threads, x.len().saturating_mul(8));
        plan::share_rows(threads, x, width, |row, rows| {
            for (i, x) in rows.chunks_exact_mut(width.max(1)).enumerate() {
                rotary.rotate_at(level, x, d, tokens.position(row + i, &first))?;
            }
            Ok(())
        })
    }
}
