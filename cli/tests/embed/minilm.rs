//! all-MiniLM-L6-v2: the embeddings of recorded texts, computed in f64 from the same weights.

use std::path::PathBuf;

use serde_json::Value;

use crate::embeddings;

const LIMIT: f64 = 5e-6;

#[test]
#[ignore = "needs all-MiniLM-L6-v2: `bash .ci/models.sh` fetches it and runs this"]
fn minilm_gives_the_recorded_embeddings() {
    let folder = std::env::var_os("HEADWISE_MINILM").expect("HEADWISE_MINILM names the model's directory");
    let recorded: Value =
        serde_json::from_str(include_str!("../data/minilm-embeddings.json")).expect("the recorded values");
    let list = |key: &str| recorded[key].as_array().expect("a list").clone();
    let texts = list("texts");
    let texts: Vec<&str> = texts.iter().map(|text| text.as_str().expect("a text")).collect();
    let got = embeddings(&PathBuf::from(folder), &texts, "");
    assert_eq!(got.len(), texts.len());
    for (((tokens, got), ids), want) in got.into_iter().zip(list("token_ids")).zip(list("embeddings")) {
        assert_eq!(Some(tokens), ids.as_array().map(Vec::len));
        let want = want.as_array().expect("a list");
        assert_eq!(got.len(), want.len());
        for (got, want) in got.into_iter().zip(want) {
            let want = want.as_f64().expect("a number");
            assert!((f64::from(got) - want).abs() < LIMIT, "{got} {want}");
        }
    }
}
