//! What it computes, and in which forms it takes texts and tells the result.

use std::fs;

use serde_json::json;

use crate::{Model, WHOLE, embed, embeddings};

/// Texts and their tokens, of all lengths from 3 to the 16 positions.
const TEXTS: [(&str, &[usize]); 4] = [
    ("The river", &[1, 4, 5, 2]),
    ("the bank was closed.", &[1, 4, 6, 9, 10, 11, 2]),
    ("Walked", &[1, 7, 8, 2]),
    (
        "the river bank was closed . the river bank was walked .",
        &[1, 4, 5, 6, 9, 10, 11, 4, 5, 6, 9, 7, 8, 11, 2],
    ),
];

fn assert_close(what: &str, got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let error = got.iter().zip(want).map(|(&got, want)| (f64::from(got) - want).abs()).fold(0.0, f64::max);
    assert!(error < 2e-6, "{what}: error {error:e}");
}

#[test]
fn embeddings_are_those_of_the_formula() {
    let model = Model::new();
    let folder = model.write("formula");
    let texts = TEXTS.map(|(text, _)| text);
    for ((text, ids), (tokens, got)) in TEXTS.into_iter().zip(embeddings(&folder, &texts, "")) {
        assert_eq!(tokens, ids.len(), "{text}");
        assert_close(text, &got, &model.embedding(ids, false, &WHOLE));
    }
}

#[test]
fn the_first_token_where_the_model_says_so() {
    let mut model = Model::new();
    model.pooling = Some(json!({"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}));
    let folder = model.write("first");
    for (text, ids) in TEXTS {
        assert_close(text, &embeddings(&folder, &[text], "")[0].1, &model.embedding(ids, true, &WHOLE));
    }
}

/// Hundreds of texts fill several batches: neither the texts beside it nor the threads change a bit of one.
#[test]
fn batches_and_threads_change_nothing() {
    let folder = Model::new().write("batches");
    let alone: Vec<Vec<f32>> =
        TEXTS.iter().map(|(text, _)| embeddings(&folder, &[text], "").swap_remove(0).1).collect();
    let lines: String = (0..400).map(|i| format!("{}\n", TEXTS[i * i % 7 % 4].0)).collect();
    for threads in ["1", "2", "3"] {
        let all = embeddings(&folder, &["--threads", threads], &lines);
        assert_eq!(all.len(), 400);
        for (i, (_, got)) in all.iter().enumerate() {
            assert_eq!(got, &alone[i * i % 7 % 4], "text {i}, {threads} threads");
        }
    }
}

/// Old files name the parts of a norm otherwise, and put `bert.` before everything.
#[test]
fn old_names_mean_the_same() {
    let model = Model::new();
    let mut old = model.clone();
    old.tensors = model
        .tensors
        .iter()
        .map(|(name, tensor)| {
            let name = name
                .replace("LayerNorm.weight", "LayerNorm.gamma")
                .replace("LayerNorm.bias", "LayerNorm.beta");
            (format!("bert.{name}"), tensor.clone())
        })
        .collect();
    let text = [TEXTS[1].0];
    assert_eq!(embeddings(&old.write("old"), &text, ""), embeddings(&model.write("new"), &text, ""));
}

#[test]
fn texts_from_arguments_a_file_or_standard_input() {
    let folder = Model::new().write("sources");
    let arguments = embeddings(&folder, &["the river", "bank"], "");
    assert_eq!(arguments, embeddings(&folder, &[], "the river\nbank\n"));
    assert_eq!(arguments, embeddings(&folder, &[], "the river\r\nbank"));
    let file = folder.join("texts");
    fs::write(&file, "the river\nbank\n").expect("the texts are written");
    assert_eq!(arguments, embeddings(&folder, &["--file", file.to_str().expect("a name in UTF-8")], ""));
}

#[test]
fn the_table_shows_texts_and_cosines() {
    let model = Model::new();
    let output = embed(&model.write("table"), &[TEXTS[0].0, TEXTS[1].0], "");
    let (a, b) = (model.embedding(TEXTS[0].1, false, &WHOLE), model.embedding(TEXTS[1].1, false, &WHOLE));
    let cosine: f64 = a.iter().zip(&b).map(|(a, b)| a * b).sum();
    let want = format!(
        "  1  The river\n  2  the bank was closed.\n\n         1      2\n  \
         1  1.000 {cosine:>6.3}\n  2 {cosine:>6.3}  1.000\n"
    );
    assert_eq!(String::from_utf8_lossy(&output.stdout), want);
}
