//! all-MiniLM-L6-v2 on an English text: what is known of encoders of its kind (Clark et al. 2019, "What Does BERT
//! Look At?", section 3).

use crate::*;

#[test]
#[ignore = "needs all-MiniLM-L6-v2: `bash .ci/models.sh` fetches it and runs this"]
fn minilm_has_the_heads_that_are_known_of_encoders() {
    let folder = std::env::var_os("HEADWISE_MINILM").expect("HEADWISE_MINILM names the model's directory");
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/text.txt");
    let report = report(Path::new(&folder), &text);
    let heads = list(&report, "heads");
    println!("{report}");
    assert_eq!(heads.len(), 72);
}
