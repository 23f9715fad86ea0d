//! The differential suite: every level of this machine against the reference.

#[path = "../cli/src/case.rs"]
mod case;

use case::Case;
use half::bf16;
use headwise::{Attention, Level, View};

fn levels() -> Vec<Level> {
    Level::available().collect()
}

/// A run on a processor that is meant to have a level says so; this is how it knows that it did.
#[test]
fn expected_level_is_detected() {
    if let Ok(name) = std::env::var("EXPECT_LEVEL") {
        assert_eq!(Level::detect().name(), name);
    }
}

/// What is computed is at the level that `HEADWISE_LEVEL` names, or at the best one: of bf16, as some are for
/// nothing else.
#[test]
fn forced_level_is_used() -> Result<(), headwise::Error> {
    let data = [bf16::ONE; 64 * 8];
    let x = View::bhld(&data, [1, 1, 64, 8])?;
    let plan = Attention::new().plan(x, x, x)?;
    let forced = std::env::var("HEADWISE_LEVEL").ok().filter(|name| !name.is_empty());
    assert_eq!(plan.level().name(), forced.as_deref().unwrap_or(Level::detect().name()));
    assert_eq!(plan.kernel(), format!("{}-bf16", plan.level()));
    Ok(())
}

/// Every second case from `first` on: in two tests, as emulators run a test on one core.
fn random_cases(first: u64) {
    let cases = std::env::var("CASES").map_or(1500, |n| n.parse().expect("CASES is a number"));
    for seed in (first..cases).step_by(2) {
        let case = Case::from_seed(seed);
        if let Err(what) = case.check(&levels()) {
            panic!("seed {seed}: {what}\n{:?}", case.terms());
        }
    }
}

#[test]
fn random_cases_at_every_level() {
    random_cases(0);
}

#[test]
fn more_random_cases_at_every_level() {
    random_cases(1);
}
