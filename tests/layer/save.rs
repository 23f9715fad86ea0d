//! Layers into a file and out of it again: the same numbers, the same bits of every result; and files that
//! tell what is not so.

use half::{bf16, f16};
use headwise::layer::{
    Checkpoint, Linear, MultiHead, MultiHeadConfig, Norm, Pairing, Rotary, Tokens, WeightLayout, Weights,
    WeightsError, Workspace, save,
};
use headwise::{Attention, Element};
use safetensors::SafeTensors;
use serde_json::Value;

use crate::*;

fn typed<T: Element + headwise::layer::Weight>(mut layer: MultiHead) -> MultiHead {
    let linears = layer.linears().map(|linear| {
        let numbers: Vec<T> = linear.weights(WeightLayout::OutIn).into_iter().map(T::from_f32).collect();
        let weights =
            Weights::pack(&numbers, WeightLayout::OutIn, linear.inputs(), linear.outputs()).unwrap();
        Linear::with_weights(weights, linear.bias()).unwrap()
    });
    let [q, k, v, out] = linears;
    layer = MultiHead::new(layer.config(), q, k, v, out).unwrap();
    layer
}

fn layers() -> Vec<MultiHead> {
    let config = MultiHeadConfig { kv_heads: 2, d_k: 6, d_v: 5, d_out: 9, ..MultiHeadConfig::new(10, 4) };
    let plain = || layer(config, [true, false, true, true]);
    let rotary = Rotary::new(4, Pairing::Interleaved, 12_345.6).unwrap();
    let norms = || (Norm::layer(&noise(60, 6), Some(&noise(61, 6)), 1e-5), Norm::rms(&noise(62, 6), 3e-7));
    let with_all = |layer: MultiHead| {
        let (q, k) = norms();
        let layer = layer.with_norms(Some(q.unwrap()), Some(k.unwrap())).unwrap();
        layer.with_rotary(rotary.clone()).unwrap().with_scale(0.3)
    };
    let pruned = |mut layer: MultiHead, heads: &[usize]| {
        layer.prune(heads).unwrap();
        layer
    };
    vec![
        plain(),
        with_all(plain()),
        pruned(with_all(plain()), &[1]),
        pruned(pruned(plain(), &[0, 1]), &[3]),
        pruned(plain(), &[0, 1, 2, 3]),
        with_all(typed::<f16>(plain())),
        pruned(typed::<bf16>(plain()), &[2]),
    ]
}

fn out(layer: &MultiHead) -> Vec<f32> {
    let x = noise(63, 6 * 10);
    let mut out = vec![f32::NAN; 6 * 9];
    layer.forward(Tokens::even(&x, 2, 3), &Attention::new(), &mut Workspace::new(), &mut out).unwrap();
    out
}

#[test]
fn loaded_layers_are_the_saved_ones() {
    let layers = layers();
    let names: Vec<String> = (0..layers.len()).map(|i| format!("blocks.{i}.attention")).collect();
    let file = save(names.iter().map(String::as_str).zip(&layers)).unwrap();
    assert_eq!(file, save(names.iter().map(String::as_str).zip(&layers)).unwrap());
    let checkpoint = Checkpoint::new([&file[..]]).unwrap();
    for (name, layer) in names.iter().zip(&layers) {
        let again = checkpoint.saved(name).unwrap();
        assert_eq!((again.config(), again.kept()), (layer.config(), layer.kept()), "{name}");
        assert_eq!(again.groups().collect::<Vec<_>>(), layer.groups().collect::<Vec<_>>());
        assert_eq!((again.norms(), again.scale()), (layer.norms(), layer.scale()));
        assert_eq!(
            (again.parameters(), again.select(&[0, 1, 2, 3])),
            (layer.parameters(), layer.select(&[0, 1, 2, 3]))
        );
        let bytes = |layer: &MultiHead| layer.linears().map(|linear| linear.bytes());
        assert_eq!((out(&again), bytes(&again)), (out(layer), bytes(layer)), "{name}");
        // Numbers go on from where they were.
        let (mut again, mut layer) = (again, layer.clone());
        assert_eq!((again.prune(&[3]), layer.prune(&[3])), (Ok(()), Ok(())));
        assert_eq!((again.kept(), out(&again)), (layer.kept(), out(&layer)));
    }
    // One without a prefix, and the names that others know.
    let file = save([("", &layers[0])]).unwrap();
    let checkpoint = Checkpoint::new([&file[..]]).unwrap();
    assert_eq!(out(&checkpoint.saved("").unwrap()), out(&layers[0]));
    assert_eq!(checkpoint.scheme("").map(|scheme| scheme.name()), Some("llama"));
    assert_eq!(save([("a", &layers[0]), ("a", &layers[1])]), Err(WeightsError::Twice("a".into())));
}

#[test]
fn files_that_tell_what_is_not_so() {
    let mut layer = layers().remove(1);
    layer.prune(&[1]).unwrap();
    let file = save([("a", &layer)]).unwrap();
    let (_, header) = SafeTensors::read_metadata(&file).unwrap();
    let about: Value = serde_json::from_str(&header.metadata().as_ref().unwrap()["headwise"]).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap().tensors();
    let with = |about: &str| {
        let metadata = [("headwise".to_string(), about.to_string())].into();
        let file = safetensors::serialize(tensors.clone(), Some(metadata)).unwrap();
        Checkpoint::new([&file[..]]).unwrap().saved("a").map(|_| ())
    };
    assert_eq!(with(&about.to_string()), Ok(()));
    for text in ["", "{}", "[]", "{\"b\": {}}", "nonsense"] {
        assert!(matches!(with(text), Err(WeightsError::Metadata(_))), "{text}");
    }
    let keys = ["d_model", "d_k", "d_v", "key_width", "value_width", "d_out", "groups", "kept", "made_with"];
    let huge = u64::MAX;
    let wrong = [
        "null",
        "-1",
        "1.5",
        "\"x\"",
        "[]",
        "{}",
        "[0, 1]",
        "[0, 0, 9]",
        "[9, 8, 7]",
        "[1, 2, 900]",
        "[-1, 1, 2]",
        "0",
        &format!("{huge}"),
        &format!("[{huge}, {huge}, 1]"),
        &format!("[{huge}, 0]"),
    ];
    for (key, wrong) in keys.iter().flat_map(|key| wrong.iter().map(move |wrong| (key, wrong))) {
        if *key == "made_with" && *wrong == huge.to_string() {
            continue; // a layer may have lost any number of heads
        }
        let mut about = about.clone();
        about["a"][*key] = serde_json::from_str(wrong).unwrap();
        assert!(with(&about.to_string()).is_err(), "{key} as {wrong}");
    }
    for (key, wrong) in [
        ("q_norm", "\"x\""),
        ("q_norm", "1"),
        ("q_norm_eps", "null"),
        ("q_norm_eps", "-1"),
        ("rotary", "\"x\""),
        ("rotary", "2"),
        ("scale", "\"x\""),
    ] {
        let mut about = about.clone();
        about["a"][key] = serde_json::from_str(wrong).unwrap();
        assert!(with(&about.to_string()).is_err(), "{key} as {wrong}");
    }
}
