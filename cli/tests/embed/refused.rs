//! Whatever is wrong with a model, its files or the texts: the table of complaints.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::{HIDDEN, Model, embed};

/// Status 2, one line that has `part` in it, and nothing on standard output.
fn assert_refused(what: &str, folder: &Path, arguments: &[&str], input: &str, part: &str) {
    let result = embed(folder, arguments, input);
    let text = String::from_utf8_lossy(&result.stderr);
    assert_eq!(result.status.code(), Some(2), "{what}: {text}");
    assert!(text.lines().count() == 1 && text.starts_with("headwise: "), "{what}: not one line: {text}");
    assert!(text.contains(part), "{what}: {part:?} is not in: {text}");
    assert!(result.stdout.is_empty(), "{what}: something on standard output");
}

#[test]
fn texts() {
    let folder = Model::new().write("refused-texts");
    let long = "river ".repeat(15);
    let many = "river\n".repeat(51);
    let table: &[(&str, &[&str], &str, &str)] = &[
        ("none", &[], "", "no texts"),
        ("empty", &["river", ""], "", "text 2 is empty"),
        ("white space", &[" \t "], "", "text 1 is empty"),
        ("an empty line", &[], "river\n\nbank\n", "text 2 is empty"),
        (
            "too long",
            &["--json", "river", &long],
            "",
            "text 2 has 17 tokens, more than the model's 16 positions",
        ),
        (
            "too many for a table",
            &[],
            &many,
            "a table of 51 texts is too wide to read, the limit is 50; use --json",
        ),
        ("no such file", &["--file", "/no/such/file"], "", "cannot read \"/no/such/file\": No such file"),
        ("a folder", &["--file", "/"], "", "cannot read \"/\""),
    ];
    for (what, arguments, input, part) in table {
        assert_refused(what, &folder, arguments, input, part);
    }
    let file = folder.join("latin1");
    fs::write(&file, b"caf\xe9\n").expect("the texts are written");
    assert_refused("not UTF-8", &folder, &["--file", file.to_str().expect("a name")], "", "UTF-8");
}

#[test]
fn missing_and_broken_files() {
    assert_refused("no folder", Path::new("/no/such/model"), &["a"], "", "\"/no/such/model/config.json\"");
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        let folder = Model::new().write("refused-files");
        let path = folder.join(name);
        let whole = fs::read(&path).expect("it was written");
        for (what, bytes) in [("cut", &whole[..whole.len() / 2]), ("empty", &[]), ("garbage", &[0xff; 40])] {
            fs::write(&path, bytes).expect("the file is written");
            assert_refused(&format!("{name} {what}"), &folder, &["river"], "", name);
        }
        fs::remove_file(&path).expect("it is there");
        assert_refused(name, &folder, &["river"], "", "No such file");
        fs::create_dir(&path).expect("a folder in its place");
        assert_refused(name, &folder, &["river"], "", name);
    }
}

#[test]
fn models_that_are_no_encoder_of_this_kind() {
    let with = |key: &str, value: Value| {
        let mut model = Model::new();
        model.config[key] = value;
        model
    };
    let without = |key: &str| {
        let mut model = Model::new();
        model.config.as_object_mut().expect("an object").remove(key);
        model
    };
    let pooled = |pooling: Value| Model { pooling: Some(pooling), ..Model::new() };
    let tensor = |name: &str, tensor: Option<&[usize]>| {
        let mut model = Model::new();
        model.tensors.remove(name);
        if let Some(shape) = tensor {
            model.random(name, shape);
        }
        model
    };
    let mut nan = Model::new();
    nan.tensors.get_mut("encoder.layer.1.output.LayerNorm.bias").expect("it is there").1[0] = f32::NAN;
    let query = "encoder.layer.1.attention.self.query.weight";
    let table: &[(&str, Model, &str)] = &[
        ("a decoder", with("model_type", json!("gpt2")), "model_type is \"gpt2\", must be \"bert\""),
        ("no type", without("model_type"), "model_type is missing"),
        ("a decoder's mask", with("is_decoder", json!(true)), "is_decoder is true"),
        ("relative positions", with("position_embedding_type", json!("relative_key")), "relative_key"),
        ("an unknown function", with("hidden_act", json!("mish")), "mish"),
        ("no width", without("hidden_size"), "hidden_size"),
        ("a negative width", with("hidden_size", json!(-12)), "-12"),
        ("no heads", with("num_attention_heads", json!(0)), "not a multiple of num_attention_heads 0"),
        ("odd heads", with("num_attention_heads", json!(5)), "12 is not a multiple of num_attention_heads 5"),
        ("width 0", with("hidden_size", json!(0)), "must be"),
        ("a bad eps", with("layer_norm_eps", json!(-1.0)), "eps is -1"),
        ("more layers", with("num_hidden_layers", json!(u64::MAX)), "encoder.layer.2.attention"),
        ("another width", with("hidden_size", json!(15)), "has shape [12, 12], must be [12, 15]"),
        (
            "more positions",
            with("max_position_embeddings", json!(17)),
            "has shape [16, 12], must be [17, 12]",
        ),
        ("huge", with("intermediate_size", json!(1u64 << 60)), "must be [1152921504606846976, 12]"),
        ("maximum pooling", pooled(json!({"pooling_mode_max_tokens": true})), "1_Pooling/config.json"),
        ("no pooling", pooled(json!({})), "1_Pooling/config.json"),
        ("a tensor less", tensor(query, None), "encoder.layer.1.attention.self.query.weight is missing"),
        ("a vector", tensor(query, Some(&[HIDDEN])), "has shape [12], must be a matrix"),
        (
            "a small vocabulary",
            tensor("embeddings.word_embeddings.weight", Some(&[5, HIDDEN])),
            "vocabulary is 5",
        ),
        ("not a number", nan, "the embedding of text 1 is not finite"),
    ];
    for (what, model, part) in table {
        assert_refused(what, &model.write("refused-models"), &["river"], "", part);
    }
}
