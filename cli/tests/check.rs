//! `headwise check` from the outside: what it prints, and its exit status.

use std::process::{Command, Output};

fn check(arguments: &[&str]) -> Output {
    let command = Command::new(env!("CARGO_BIN_EXE_headwise")).arg("check").args(arguments).output();
    command.expect("the command starts")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("text")
}

#[test]
fn cases_agree_and_one_line_says_so() {
    let result = check(&["--seed", "1", "--cases", "20"]);
    assert_eq!((result.status.code(), text(&result.stderr)), (Some(0), ""));
    let line = text(&result.stdout);
    let levels: Vec<&str> = headwise::Level::available().map(|level| level.name()).collect();
    let start = format!("20 cases from seed 1 agree at {} and on [1, 2, 5] threads: ", levels.join(", "));
    assert!(line.starts_with(&start) && line.ends_with(" s\n") && line.lines().count() == 1, "{line}");
}

#[test]
fn a_seed_out_of_the_clock_is_told() {
    // No case: the gate must not depend on the clock.
    let result = check(&["--seconds", "0", "--level", "scalar"]);
    assert!(result.status.success(), "{}", text(&result.stderr));
    let (seed, line) = (text(&result.stderr).trim_end(), text(&result.stdout));
    assert!(seed.starts_with("seed ") && line.contains(&format!(" from {seed} agree at scalar ")), "{line}");
}

#[test]
fn no_case_is_no_check() {
    let result = check(&["--cases", "0"]);
    assert_eq!((result.status.code(), text(&result.stdout)), (Some(2), ""));
}

#[test]
fn a_level_that_is_not_here_is_refused() {
    let other = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
    for (level, why) in [("sse9", "sse9"), (other, "not available on this processor")] {
        let result = check(&["--level", level]);
        assert_eq!((result.status.code(), text(&result.stdout)), (Some(2), ""));
        assert!(text(&result.stderr).contains(why), "{}", text(&result.stderr));
    }
}
