//! The differential suite: every level of this machine against the reference.

#[path = "../cli/src/case.rs"]
mod case;

use case::Case;
use headwise::Level;

fn levels() -> Vec<Level> {
    Level::available().collect()
}

/// A run that is meant to force a level says so; this is how it knows that it did.
#[test]
fn expected_level_is_detected() {
    if let Ok(name) = std::env::var("EXPECT_LEVEL") {
        assert_eq!(Level::detect().name(), name);
    }
}

#[test]
fn random_cases_at_every_level() {
    let emulated = std::env::var_os("EXPECT_LEVEL").is_some();
    for seed in 0..if emulated { 150 } else { 1500 } {
        let case = Case::from_seed(seed);
        if let Err(what) = case.check(&levels()) {
            panic!("seed {seed}: {what}\n{:?}", case.terms());
        }
    }
}
