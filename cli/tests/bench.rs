//! `headwise bench --json`: one object a line, with the keys and the numbers that readers count on.

use std::process::Command;

use serde_json::Value;

#[test]
fn json_lines_hold_the_machine_and_every_row() {
    let arguments = ["bench", "--json", "--rounds", "1"];
    let shapes = ["--shape", "minilm", "--shape", "decode-short", "--shape", "speculate"];
    let levels = ["--level", "scalar", "--threads", "1", "--threads", "2"];
    let result =
        Command::new(env!("CARGO_BIN_EXE_headwise")).args(arguments).args(shapes).args(levels).output();
    let result = result.expect("the command starts");
    assert!(result.status.success(), "{}", String::from_utf8_lossy(&result.stderr));
    let text = String::from_utf8(result.stdout).expect("text");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();

    let machine = &lines[0]["machine"];
    assert!(machine["processor"].is_string() && machine["cores"].is_u64() && machine["levels"].is_array());
    assert!(["1", "2"].iter().all(|&n| machine["fma_gflops"][n].as_f64() > Some(0.0)));
    assert!(machine["level_fma_gflops"]["scalar"]["2"].as_f64() > Some(0.0));
    assert!(machine["read_gbps"]["1"].as_f64() > Some(0.0));

    assert_eq!(lines.len(), 1 + 3 * 2 * 2); // shapes, numbers of threads, implementations
    for row in &lines[1..] {
        assert_eq!((&row["type"], &row["rounds"]), (&"f32".into(), &1.into()));
        assert!(row["by"] == "gemm" || (row["by"] == "headwise" && row["level"] == "scalar"));
        assert!(
            row["median_ms"].as_f64() >= row["min_ms"].as_f64() && row["peak_percent"].as_f64() > Some(0.0)
        );
        assert_eq!(row["read_percent"].as_f64() > Some(0.0), row["shape"] != "minilm");
        assert_eq!(row["read_percent"].is_null(), row["shape"] == "minilm");
        assert!(row["extra_bytes"].as_u64() > Some(0) && row["max_error"].as_f64() < Some(2e-6), "{row}");
    }
}

#[test]
fn every_type_is_measured() {
    for (dtype, limit) in [("f16", 3e-4), ("bf16", 2e-3), ("i8", 2e-6)] {
        let arguments = ["bench", "--json", "--rounds", "1", "--threads", "1", "--type", dtype];
        let shapes = ["--shape", "minilm", "--shape", "decode-short"];
        let result = Command::new(env!("CARGO_BIN_EXE_headwise")).args(arguments).args(shapes).output();
        let result = result.expect("the command starts");
        assert!(result.status.success(), "{}", String::from_utf8_lossy(&result.stderr));
        let text = String::from_utf8(result.stdout).expect("text");
        let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!(rows.len(), 1 + 2, "no baseline in {dtype}");
        for row in &rows[1..] {
            assert!(row["type"] == dtype && row["max_error"].as_f64() < Some(limit), "{row}");
        }
    }
}

#[test]
fn what_this_version_lacks_is_refused_by_name() {
    let run = |arguments: [&str; 3]| {
        let result =
            Command::new(env!("CARGO_BIN_EXE_headwise")).args(arguments).output().expect("it starts");
        assert_eq!(result.status.code(), Some(2), "{arguments:?}");
        String::from_utf8_lossy(&result.stderr).into_owned()
    };
    assert!(run(["bench", "--type", "f64"]).contains("the types are f32, f16, bf16 and i8"));
    assert!(run(["bench", "--shape", "tiny"]).contains("the shapes are bert, classic"));
    assert!(run(["bench", "--threads", "0"]).contains("must be 1 to"));
    let level = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
    assert!(run(["bench", "--level", level]).contains("not available on this processor"));
}

/// The parts of a call come to the whole, at every level of this machine.
#[test]
fn a_profile_accounts_for_the_time() {
    let arguments = ["bench", "--profile", "--json", "--threads", "1", "--shape", "minilm"];
    let levels = headwise::Level::available().flat_map(|level| ["--level", level.name()]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_headwise"));
    let result = command.args(arguments).args(["--shape", "decode-short"]).args(levels).output();
    let result = result.expect("the command starts");
    assert!(result.status.success(), "{}", String::from_utf8_lossy(&result.stderr));
    let text = String::from_utf8(result.stdout).expect("text");
    assert_eq!(text.lines().count(), 2 * headwise::Level::available().count());
    for line in text.lines() {
        let row: Value = serde_json::from_str(line).expect("JSON");
        let shares =
            row["percent"].as_object().expect("shares").values().map(|x| x.as_f64().expect("a number"));
        assert!((99.0..101.0).contains(&shares.sum::<f64>()), "{row}");
        let share = |part: &str| row["percent"][part].as_f64().expect("a number");
        assert!(
            ["scores", "softmax", "values", "packing", "writing"].iter().all(|part| share(part) > 0.0),
            "{row}"
        );
        assert!(share("unaccounted") < 50.0 && row["median_ms"].as_f64() > Some(0.0), "{row}");
    }
}
