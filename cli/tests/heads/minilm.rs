//! all-MiniLM-L6-v2 on an English text, where it is: what must hold of any trained encoder of its kind, and
//! the heads that `docs/heads.md` names.

use crate::*;

#[test]
#[ignore = "needs all-MiniLM-L6-v2: `bash .ci/models.sh` fetches it and runs this"]
fn minilm_is_measured_whole() {
    let folder = std::env::var_os("HEADWISE_MINILM").expect("HEADWISE_MINILM names the model's directory");
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/text.txt");
    let report = report(Path::new(&folder), &text);
    let heads = list(&report, "heads");
    assert_eq!((heads.len(), list(&report, "similarity").len()), (72, 6));
    assert!(number(&report, "tokens") > 2000.0);
    for head in heads {
        for key in ["normalised_entropy", "first", "separators", "previous", "next", "diagonal", "largest"] {
            assert!((0.0..=1.0).contains(&number(head, key)), "{key} of {head}");
        }
        assert!(number(head, "importance") > 0.0, "{head}");
    }
    let labels = |layer: usize, head: usize| heads[12 * layer + head]["labels"].to_string();
    assert_eq!((labels(0, 2), labels(1, 8)), (r#"["previous"]"#.into(), r#"["next"]"#.into()));
    assert!((0..12).filter(|&head| labels(0, head) == r#"["broad"]"#).count() >= 6);
    assert!((12..72).all(|head| labels(head / 12, head % 12) != r#"["broad"]"#));
    let pruning = list(&report, "pruning");
    let (first, last) = (&pruning[0], &pruning[pruning.len() - 1]);
    assert!((number(first, "cosine") - 1.0).abs() < 1e-5);
    assert_eq!(number(last, "removed"), 72.0);
    assert!(number(last, "cosine") < 0.99, "{last}");
    // What is left of attention is a bias a layer.
    assert_eq!(number(last, "attention_parameters"), 6.0 * 384.0);
    assert!(number(last, "attention_time") < 0.5, "{last}");
}
