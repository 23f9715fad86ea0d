//! Whatever is wrong: status 2, one line, nothing on standard output, no file.

use serde_json::json;

use crate::*;

fn assert_refused(what: &str, output: &Output, part: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{what}: {text}");
    assert!(text.lines().count() == 1 && text.starts_with("headwise: "), "{what}: not one line: {text}");
    assert!(text.contains(part), "{what}: {part:?} is not in: {text}");
    assert!(output.stdout.is_empty(), "{what}: something on standard output");
}

#[test]
fn texts() {
    let folder = Model::new().write("refused-texts");
    for (what, bytes, part) in [
        ("empty", &b""[..], "text.txt\" is empty: no sentences"),
        ("white space", b" \n\t\n", "is empty"),
        ("no words", b"... !\n", "is empty"),
        ("not UTF-8", b"caf\xe9", "UTF-8"),
    ] {
        let file = text(&folder, bytes);
        assert_refused(what, &heads(&folder, &file, &[]), part);
    }
    assert_refused(
        "no file",
        &heads(&folder, Path::new("/no/such/file"), &[]),
        "cannot read \"/no/such/file\": No such",
    );
    assert_refused("a folder", &heads(&folder, Path::new("/"), &[]), "cannot read \"/\"");
}

#[test]
fn models() {
    let with = |key: &str, value: Value| {
        let mut model = Model::new();
        model.config[key] = value;
        model
    };
    let mut nan = Model::new();
    nan.tensors.get_mut("encoder.layer.1.output.LayerNorm.bias").expect("it is there").1[0] = f32::NAN;
    let mut small = Model::new();
    small.random("embeddings.word_embeddings.weight", &[5, HIDDEN]);
    let table = [
        ("a decoder", with("model_type", json!("gpt2")), "model_type is \"gpt2\", must be \"bert\""),
        ("a decoder's mask", with("is_decoder", json!(true)), "is_decoder is true"),
        ("no layers", with("num_hidden_layers", json!(0)), "the model has no layers"),
        ("another width", with("hidden_size", json!(15)), "has shape [12, 12], must be [12, 15]"),
        ("a small vocabulary", small, "vocabulary is 5"),
        ("not a number", nan, "the numbers of layer 1 are not finite"),
    ];
    for (what, model, part) in table {
        let folder = model.write("refused-models");
        let page = folder.join("page.html");
        let output = heads(&folder, &text(&folder, TEXT), &["--html", page.to_str().expect("a name")]);
        assert_refused(what, &output, part);
        let left = fs::read_dir(&folder).expect("a folder").flatten();
        assert!(
            left.map(|entry| entry.file_name()).all(|name| !name.to_string_lossy().contains("page")),
            "{what}"
        );
    }
    let output = heads(Path::new("/no/such/model"), Path::new("/dev/null"), &[]);
    assert_refused("no model", &output, "\"/no/such/model/config.json\"");
}

#[test]
fn choices_and_outputs() {
    let folder = Model::new().write("refused-choices");
    let (file, inside) = (text(&folder, TEXT), folder.join("text.txt/svg"));
    let weights = folder.join("model.safetensors");
    let (folder_name, inside) = (folder.to_str().expect("a name"), inside.to_str().expect("a name"));
    for (arguments, part) in [
        (&["--layer", "2"][..], "there is no layer 2: they are numbered 0 to 1"),
        (&["--head", "3"], "there is no head 3: they are numbered 0 to 2"),
        (&["--sentence", "0"], "there is no sentence 0: they are numbered 1 to 4"),
        (&["--sentence", "5"], "there is no sentence 5: they are numbered 1 to 4"),
        (&["--html", "/no/such/place/page.html"], "cannot write \"/no/such/place/page.html\": No such"),
        (&["--html", folder_name], "not a regular file"),
        (&["--html", "/dev/full"], "cannot write \"/dev/full\""),
        (&["--svg", inside], "cannot write"),
        (&["--html", file.to_str().expect("a name")], "it is an input of this command"),
        (&["--html", weights.to_str().expect("a name")], "it is an input of this command"),
    ] {
        assert_refused(&format!("{arguments:?}"), &heads(&folder, &file, arguments), part);
    }
}
