//! Layers into a safetensors file, and out of it again just as they were: pruned, pooled, with their norms
//! and rotary positions.
//!
//! ```text
//! {prefix}.q_proj.weight [out, in], .bias; k_proj, v_proj, o_proj; q_norm, k_norm; rotary.frequencies
//! metadata "headwise": {prefix: {"d_model": .., "groups": [..], "kept": [..], "made_with": ..}} as JSON
//! ```
//!
//! Weights keep their type. An axis of 0 has no tensor: a layer may have lost all of its heads.

use std::borrow::Cow;

use half::{bf16, f16};
use headwise_kernels::{DType, NormKind, Pairing, WeightLayout};
use safetensors::{Dtype, View};
use serde_json::{Map, Value, json};

use super::heads::{MultiHead, MultiHeadConfig};
use super::linear::Linear;
use super::norm::Norm;
use super::rotary::Rotary;
use super::scheme::join;
use super::weights::{Checkpoint, WeightsError};

/// The metadata that tells what names and shapes do not.
const KEY: &str = "headwise";
const LINEARS: [&str; 4] = ["q_proj", "k_proj", "v_proj", "o_proj"];
const NORMS: [&str; 2] = ["q_norm", "k_norm"];

/// One safetensors file of some layers, each under a prefix of its own. [`Checkpoint::saved`] reads them.
///
/// ```
/// use headwise::layer::{Checkpoint, save};
/// # use headwise::layer::{Linear, MultiHead, MultiHeadConfig, WeightLayout};
/// # let linear = || Linear::new(&[0.5; 64], WeightLayout::OutIn, [8, 8], None);
/// # let mut layer = MultiHead::new(MultiHeadConfig::new(8, 4), linear()?, linear()?, linear()?, linear()?)?;
/// layer.prune(&[0, 2])?;
/// let file = save([("encoder.0", &layer)])?;
/// let again = Checkpoint::new([&file[..]])?.saved("encoder.0")?;
/// assert_eq!(again.kept(), [1, 3]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`WeightsError::Twice`] if two layers have the same prefix.
pub fn save<'l>(layers: impl IntoIterator<Item = (&'l str, &'l MultiHead)>) -> Result<Vec<u8>, WeightsError> {
    let (mut tensors, mut about) = (Vec::new(), Map::new());
    for (prefix, layer) in layers {
        if about.insert(prefix.to_string(), describe(layer)).is_some() {
            return Err(WeightsError::Twice(prefix.to_string()));
        }
        let mut add = |name: String, dtype, shape: Vec<usize>, bytes| {
            if !shape.contains(&0) {
                tensors.push((join(prefix, &name), Bytes { dtype, shape, bytes }));
            }
        };
        let vector = |x: &[f32]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        for (name, linear) in LINEARS.into_iter().zip(layer.linears()) {
            let (dtype, bytes) = matrix(linear);
            add(format!("{name}.weight"), dtype, vec![linear.outputs(), linear.inputs()], bytes);
            if let Some(bias) = linear.bias() {
                add(format!("{name}.bias"), Dtype::F32, vec![bias.len()], vector(bias));
            }
        }
        for (name, norm) in NORMS.into_iter().zip(layer.norms()) {
            let Some(norm) = norm else { continue };
            add(format!("{name}.weight"), Dtype::F32, vec![norm.features()], vector(norm.weight()));
            if let Some(bias) = norm.bias() {
                add(format!("{name}.bias"), Dtype::F32, vec![bias.len()], vector(bias));
            }
        }
        if let Some(rotary) = layer.rotary() {
            let bytes = rotary.frequencies().iter().flat_map(|x| x.to_le_bytes()).collect();
            add("rotary.frequencies".into(), Dtype::F64, vec![rotary.frequencies().len()], bytes);
        }
    }
    let metadata = [(KEY.to_string(), Value::Object(about).to_string())].into();
    safetensors::serialize(tensors, Some(metadata)).map_err(|error| WeightsError::Format(error.to_string()))
}

impl Checkpoint<'_> {
    /// A layer that [`save`] has written under this prefix.
    ///
    /// # Errors
    /// [`WeightsError::Metadata`] if the file does not tell of it; otherwise as [`Checkpoint::multi_head`].
    pub fn saved(&self, prefix: &str) -> Result<MultiHead, WeightsError> {
        let about = self.metadata(KEY).find_map(|text| match serde_json::from_str(text) {
            Ok(Value::Object(mut layers)) => layers.remove(prefix),
            _ => None,
        });
        let about = about.ok_or_else(|| WeightsError::Metadata(format!("no saved layer {prefix:?}")))?;
        let about = About { prefix, about };
        let config = about.config()?;
        let MultiHeadConfig { d_model, heads, kv_heads, d_k, d_v, key_width, value_width, d_out } = config;
        let width = |heads: usize, d: usize| heads.checked_mul(d).ok_or_else(|| about.wrong("groups"));
        let sizes = [
            [d_model, width(heads, d_k)?],
            [key_width, width(kv_heads, d_k)?],
            [value_width, width(kv_heads, d_v)?],
            [width(heads, d_v)?, d_out],
        ];
        let [q, k, v, out] = [0, 1, 2, 3].map(|i| self.saved_linear(&join(prefix, LINEARS[i]), sizes[i]));
        let mut layer = MultiHead::of_parts(config, [q?, k?, v?, out?])?;
        (layer.groups, layer.kept, layer.made_with) =
            (about.list("groups")?, about.kept(heads)?, about.size("made_with")?);
        let [q, k] = NORMS.map(|name| self.saved_norm(&about, name));
        layer = layer.with_norms(q?, k?)?;
        if let Some(rotary) = self.saved_rotary(&about)? {
            layer = layer.with_rotary(rotary)?;
        }
        Ok(match about.number("scale")? {
            Some(scale) => layer.with_scale(scale),
            None => layer,
        })
    }

    fn saved_linear(&self, name: &str, sizes: [usize; 2]) -> Result<Linear, WeightsError> {
        if !sizes.contains(&0) {
            return self.linear(name, WeightLayout::OutIn, sizes);
        }
        let weight = format!("{name}.weight");
        if self.has(&weight) {
            let tensor = self.tensor(&weight)?;
            return Err(tensor.refused("left out where a size is 0".to_string()).into());
        }
        let bias = self.optional(&format!("{name}.bias"), &[sizes[1]])?.map(|bias| bias.numbers());
        Ok(Linear::new(&[], WeightLayout::OutIn, sizes, bias.as_deref())?)
    }

    fn saved_norm(&self, about: &About<'_>, name: &str) -> Result<Option<Norm>, WeightsError> {
        let Some(kind) = about.text(name)? else { return Ok(None) };
        let eps = about.number(&format!("{name}_eps"))?.ok_or_else(|| about.wrong(name))?;
        let weight = self.tensor(&join(about.prefix, &format!("{name}.weight")))?.numbers();
        let bias = self.optional(&join(about.prefix, &format!("{name}.bias")), &[weight.len()])?;
        Ok(Some(match kind {
            "layer" => Norm::layer(&weight, bias.map(|bias| bias.numbers()).as_deref(), eps)?,
            "rms" => Norm::rms(&weight, eps)?,
            _ => return Err(about.wrong(name)),
        }))
    }

    fn saved_rotary(&self, about: &About<'_>) -> Result<Option<Rotary>, WeightsError> {
        let pairing = match about.text("rotary")? {
            None => return Ok(None),
            Some("halves") => Pairing::Halves,
            Some("interleaved") => Pairing::Interleaved,
            Some(_) => return Err(about.wrong("rotary")),
        };
        let bytes = self.bytes(&join(about.prefix, "rotary.frequencies"), Dtype::F64).unwrap_or_default();
        let frequencies: Vec<f64> = bytes.as_chunks().0.iter().map(|&x| f64::from_le_bytes(x)).collect();
        Ok(Some(Rotary::with_frequencies(2 * frequencies.len(), pairing, &frequencies)?))
    }
}

fn describe(layer: &MultiHead) -> Value {
    let MultiHeadConfig { d_model, d_k, d_v, key_width, value_width, d_out, .. } = layer.config();
    let mut about = json!({
        "d_model": d_model, "d_k": d_k, "d_v": d_v, "key_width": key_width, "value_width": value_width,
        "d_out": d_out, "groups": layer.groups, "kept": layer.kept, "made_with": layer.made_with,
    });
    for (name, norm) in NORMS.into_iter().zip(layer.norms()) {
        if let Some(norm) = norm {
            about[name] = match norm.kind() {
                NormKind::Layer => "layer".into(),
                NormKind::Rms => "rms".into(),
            };
            about[format!("{name}_eps")] = norm.eps().into();
        }
    }
    if let Some(rotary) = layer.rotary() {
        about["rotary"] = match rotary.pairing() {
            Pairing::Halves => "halves".into(),
            Pairing::Interleaved => "interleaved".into(),
        };
    }
    if let Some(scale) = layer.scale() {
        about["scale"] = scale.into();
    }
    about
}

/// What the metadata say of a layer. They are not trusted.
struct About<'p> {
    prefix: &'p str,
    about: Value,
}

impl About<'_> {
    fn wrong(&self, key: &str) -> WeightsError {
        WeightsError::Metadata(format!("{key} of layer {:?} is missing or not as it must be", self.prefix))
    }

    fn size(&self, key: &str) -> Result<usize, WeightsError> {
        self.about[key].as_u64().and_then(|x| x.try_into().ok()).ok_or_else(|| self.wrong(key))
    }

    fn list(&self, key: &str) -> Result<Vec<usize>, WeightsError> {
        let number = |x: &Value| x.as_u64().and_then(|x| x.try_into().ok());
        let list = self.about[key].as_array().and_then(|list| list.iter().map(number).collect());
        list.ok_or_else(|| self.wrong(key))
    }

    fn number(&self, key: &str) -> Result<Option<f32>, WeightsError> {
        match &self.about[key] {
            Value::Null => Ok(None),
            value => value.as_f64().map(|x| Some(x as f32)).ok_or_else(|| self.wrong(key)),
        }
    }

    fn text(&self, key: &str) -> Result<Option<&str>, WeightsError> {
        match &self.about[key] {
            Value::Null => Ok(None),
            value => value.as_str().map(Some).ok_or_else(|| self.wrong(key)),
        }
    }

    /// The sizes; the heads are those of the groups.
    fn config(&self) -> Result<MultiHeadConfig, WeightsError> {
        let groups = self.list("groups")?;
        let heads = groups.iter().try_fold(0usize, |sum, &group| sum.checked_add(group));
        let heads = heads.filter(|_| !groups.contains(&0)).ok_or_else(|| self.wrong("groups"))?;
        Ok(MultiHeadConfig {
            d_model: self.size("d_model")?,
            heads,
            kv_heads: groups.len(),
            d_k: self.size("d_k")?,
            d_v: self.size("d_v")?,
            key_width: self.size("key_width")?,
            value_width: self.size("value_width")?,
            d_out: self.size("d_out")?,
        })
    }

    /// The numbers of the heads: rising, and below the number of heads that the layer was made with.
    fn kept(&self, heads: usize) -> Result<Vec<usize>, WeightsError> {
        let (kept, made_with) = (self.list("kept")?, self.size("made_with")?);
        let rising = kept.windows(2).all(|two| two[0] < two[1]);
        let fits = kept.len() == heads && rising && kept.last().is_none_or(|&last| last < made_with);
        if fits { Ok(kept) } else { Err(self.wrong("kept")) }
    }
}

/// A tensor to be written.
struct Bytes {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl View for Bytes {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// The weights `[outputs, inputs]` in their own type.
fn matrix(linear: &Linear) -> (Dtype, Vec<u8>) {
    let numbers = linear.weights(WeightLayout::OutIn);
    match linear.packed().dtype() {
        DType::F16 => (Dtype::F16, numbers.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect()),
        DType::Bf16 => (Dtype::BF16, numbers.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect()),
        _ => (Dtype::F32, numbers.iter().flat_map(|x| x.to_le_bytes()).collect()),
    }
}
