//! A case with its tokens where a server has them: sequences side by side, in pages, in a ring. Where tokens
//! lie must not change a bit.

use headwise::{Attention, DType, Element, Error, Level, Stored, View, ViewMut};

use super::{Case, Draw, Tensor, Typed};

/// Where the tokens of K and V lie.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Form {
    /// By strides: the case itself.
    Strided,
    /// As sequences of their valid tokens, side by side; Q and the output, too.
    Packed,
    /// In pages of this many tokens; under a mask or bias of all keys, of fewer, so that they end together.
    Paged(usize),
    /// In a ring behind tokens that stay, from this place of the ring on.
    Rolling {
        /// Tokens that stay.
        keep: usize,
        /// The place of the ring's first token.
        first: usize,
    },
}

impl Form {
    pub(super) fn draw(draw: &mut Draw<'_>, lk: usize) -> Self {
        match draw.below(6) {
            1 => Self::Packed,
            2 => Self::Paged(1 + draw.below(40)),
            3 => {
                let keep = draw.below(lk + 1);
                Self::Rolling { keep, first: draw.below(lk - keep) }
            }
            _ => Self::Strided,
        }
    }
}

/// Tokens in memory.
struct Layout {
    form: Form,
    /// Tokens of each batch entry, and where they start, packed.
    lens: Vec<usize>,
    starts: Vec<usize>,
    /// Of a ring, the size of the axis and where each entry's starts.
    axis: usize,
    firsts: Vec<usize>,
    table: Vec<u32>,
}

impl Layout {
    /// Tokens `lens` of an axis, which pages have to end with, or not.
    fn new(form: Form, lens: Vec<usize>, axis: usize, whole: bool) -> Self {
        let starts = (0..=lens.len()).map(|b| lens[..b].iter().sum()).collect();
        let (mut form, mut table, mut firsts) = (form, Vec::new(), Vec::new());
        match &mut form {
            Form::Paged(size) => {
                *size = (1..=*size).rev().find(|size| !whole || axis.is_multiple_of(*size)).unwrap_or(1);
                let longest = lens.iter().max().copied().unwrap_or(0);
                let pages = lens.len() * if whole { axis } else { longest }.div_ceil(*size);
                table = (0..pages as u32).rev().collect();
            }
            Form::Rolling { first, .. } => firsts = vec![*first; lens.len()],
            Form::Strided | Form::Packed => {}
        }
        Self { form, lens, starts, axis, firsts, table }
    }

    /// Batch entries and tokens of the memory.
    fn axes(&self) -> [usize; 2] {
        match self.form {
            Form::Packed => [1, self.starts[self.lens.len()]],
            Form::Paged(size) => [self.table.len() + 1, size], // one that is nobody's
            Form::Strided | Form::Rolling { .. } => [self.lens.len(), self.axis],
        }
    }

    /// Where a token lies in it.
    fn place(&self, b: usize, token: usize) -> [usize; 2] {
        match self.form {
            Form::Strided => [b, token],
            Form::Packed => [0, self.starts[b] + token],
            Form::Paged(size) => {
                let page = b * self.table.len() / self.lens.len() + token / size;
                [self.table[page] as usize, token % size]
            }
            Form::Rolling { keep, .. } if token < keep => [b, token],
            Form::Rolling { keep, first } => [b, keep + (token - keep + first) % (self.axis - keep)],
        }
    }

    /// The valid tokens of `x` in memory, `empty` in between.
    fn lay<E: Copy>(&self, x: View<'_, E>, empty: E) -> Tensor<E> {
        let ([_, heads, _, features], [entries, tokens]) = (x.shape(), self.axes());
        let shape = [entries, heads, tokens, features];
        let mut to = Tensor { data: vec![empty; shape.iter().product()], offset: 0, shape, strides: [0; 4] };
        to.strides = [heads * tokens * features, tokens * features, features, 1].map(|n| n as isize);
        for (b, &len) in self.lens.iter().enumerate() {
            for (h, token) in (0..heads).flat_map(|h| (0..len).map(move |token| (h, token))) {
                let [entry, place] = self.place(b, token);
                let row = ((entry * heads + h) * tokens + place) * features;
                for c in 0..features {
                    to.data[row + c] = x.get([b, h, token, c]).expect("a valid token");
                }
            }
        }
        to
    }

    fn view<'a, E>(&'a self, x: View<'a, E>) -> Result<View<'a, E>, Error> {
        match self.form {
            Form::Strided => Ok(x),
            Form::Packed => x.packed(&self.starts),
            Form::Paged(_) => x.paged(&self.table, &self.lens),
            Form::Rolling { keep, .. } => x.rolling(keep, &self.firsts, &self.lens),
        }
    }
}

impl Case {
    /// Runs the case in its form, which must give the same bits as by strides; any NaN is like any other.
    pub(super) fn check_form(&self, level: Level) -> Result<(), String> {
        let bits = |form| {
            let answer = self.typed(Served(self, level, form));
            let (out, lse) = answer.map_err(|error| format!("{level}, {form:?}: {error}"))?;
            let bits = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
            Ok::<_, String>([out, lse].concat().into_iter().map(bits).collect::<Vec<u32>>())
        };
        let (got, want) = (bits(self.form)?, bits(Form::Strided)?);
        match (0..want.len()).find(|&at| got[at] != want[at]) {
            None => Ok(()),
            Some(at) => {
                let [got, want] = [got[at], want[at]].map(f32::from_bits);
                Err(format!("{level}: [out, lse][{at}] is {got:e} {:?}, by strides {want:e}", self.form))
            }
        }
    }
}

/// The answer of a case in a form, laid out as the strided one's. Memory is compact: another path may take
/// what is not, and round otherwise.
struct Served<'a>(&'a Case, Level, Form);

impl Typed for Served<'_> {
    type Output = Result<(Vec<f32>, Vec<f32>), Error>;

    fn call<T: Element, C: Stored>(self, q: View<'_, T>, k: View<'_, C>, v: View<'_, C>) -> Self::Output {
        let Self(case, level, form) = self;
        let ([b, hq, lq, _], lk, dv) = (q.shape(), k.shape()[2], v.shape()[3]);
        let lens = |lens: &Option<Vec<usize>>, axis| lens.clone().unwrap_or(vec![axis; b]);
        let last_axis = [case.mask.as_ref().map(|x| x.shape[3]), case.bias.as_ref().map(|x| x.shape[3])];
        let whole = last_axis.into_iter().flatten().any(|keys| keys > 1);
        let keys = Layout::new(form, lens(&case.kv_lens, lk), lk, whole);
        let packed = form == Form::Packed;
        let queries = if packed {
            Layout::new(Form::Packed, lens(&case.q_lens, lq), lq, false)
        } else {
            Layout::new(Form::Strided, vec![lq; b], lq, false)
        };

        let q = queries.lay(q, T::from_f32(f32::NAN));
        let [k, v] = [k, v].map(|x| keys.lay(x, C::from_f32(f32::NAN)));
        let scales = case.scales.each_ref().map(|x| keys.lay(x.view(), f32::NAN));
        let (mut view_k, mut view_v) = (k.view(), v.view());
        if C::DTYPE == DType::I8 {
            (view_k, view_v) = (view_k.scaled(scales[0].view())?, view_v.scaled(scales[1].view())?);
        }
        let (view_k, view_v) = (keys.view(view_k)?, keys.view(view_v)?);
        let mut terms = case.terms();
        if form != Form::Strided {
            terms.kv_lens = None;
        }
        if packed {
            let longest = [&queries, &keys].map(|layout| layout.lens.iter().max().copied().unwrap_or(0));
            terms.q_lens = None;
            terms.mask = case.mask.as_ref().map(|mask| mask.cut(longest));
            terms.bias = case.bias.as_ref().map(|bias| bias.cut(longest));
        }

        let [entries, tokens] = queries.axes();
        let mut out = vec![T::from_f32(f32::NAN); entries * hq * tokens * dv];
        let mut lse = vec![f32::NAN; entries * hq * tokens];
        let mut to = ViewMut::bhld(&mut out, [entries, hq, tokens, dv])?;
        if packed {
            to = to.packed(&queries.starts)?;
        }
        let q = queries.view(q.view())?;
        Attention::with_terms(terms).level(level).run_with_lse(q, view_k, view_v, to, &mut lse)?;

        let mut answer = (vec![0.0; b * hq * lq * dv], vec![f32::NEG_INFINITY; b * hq * lq]);
        for (b, &len) in queries.lens.iter().enumerate() {
            for (h, token) in (0..hq).flat_map(|h| (0..len).map(move |token| (h, token))) {
                let [entry, place] = queries.place(b, token);
                let (row, from) = ((b * hq + h) * lq + token, (entry * hq + h) * tokens + place);
                answer.1[row] = lse[from];
                for c in 0..dv {
                    answer.0[row * dv + c] = out[from * dv + c].to_f32();
                }
            }
        }
        Ok(answer)
    }
}

impl<E: Copy> Tensor<E> {
    /// A mask or bias of the first queries and keys, where it has several.
    fn cut(&self, longest: [usize; 2]) -> View<'_, E> {
        let [b, h, lq, lk] = self.shape;
        let cut = |axis, longest| if axis > 1 { longest } else { axis };
        let shape = [b, h, cut(lq, longest[0]), cut(lk, longest[1])];
        View::new(&self.data, self.offset, shape, self.strides).expect("a part of what fits")
    }
}
