//! Whatever is wrong with files, tensors, options or usage: the table of complaints.

use std::fs;
use std::path::Path;
use std::process::Output;

use safetensors::Dtype;

use crate::{File, folder, headwise, run_bytes};

/// Status 2, one line that has `part` in it, and no file in `folder` but the inputs.
fn assert_refused(what: &str, folder: &Path, result: &Output, part: &str) {
    let text = String::from_utf8_lossy(&result.stderr);
    assert_eq!(result.status.code(), Some(2), "{what}: {text}");
    assert!(text.lines().count() == 1 && text.starts_with("headwise: "), "{what}: not one line: {text}");
    assert!(text.contains(part), "{what}: {part:?} is not in: {text}");
    assert!(result.stdout.is_empty(), "{what}: something on standard output");
    let files =
        fs::read_dir(folder).expect("the folder is there").map(|entry| entry.expect("it is").file_name());
    let files: Vec<_> = files.filter(|name| name != "in.safetensors" && name != "options.json").collect();
    assert!(files.is_empty(), "{what}: left {files:?} behind");
}

#[test]
fn wrong_tensors_are_refused() {
    let small = File::small;
    let table: &[(&str, File, &str)] = &[
        ("no q", small().without("q"), "\"q\" is missing"),
        ("no k", small().without("k"), "\"k\" is missing"),
        ("no v", small().without("v"), "\"v\" is missing"),
        ("unknown name", small().random("weights", &[2]), "\"weights\" is unknown"),
        ("line break in a name", small().random("a\nb", &[2]), "is unknown"),
        ("q in f64", small().zeros("q", Dtype::F64, &[2, 4, 5, 8]), "q is F64, must be F32, F16 or BF16"),
        ("q in f16", small().zeros("q", Dtype::F16, &[2, 4, 5, 8]), "k is F32, must be of the type of q"),
        ("v in bf16", small().zeros("v", Dtype::BF16, &[2, 2, 7, 6]), "v is BF16, must be of the type of q"),
        (
            "bias in bf16",
            small().zeros("bias", Dtype::BF16, &[7]),
            "bias is BF16, must be F32 or of the type of q",
        ),
        ("gates in f16", small().zeros("gates", Dtype::F16, &[4]), "gates is F16, must be F32"),
        ("mask in f32", small().random("mask", &[5, 7]), "mask is F32, must be BOOL or U8"),
        ("bias in i32", small().zeros("bias", Dtype::I32, &[5, 7]), "bias is I32, must be F32"),
        ("lengths in f32", small().random("kv_lens", &[2]), "kv_lens is F32, must be I32 or I64"),
        ("slopes in i64", small().i64s("slopes", &[1; 4]), "slopes is I64, must be F32"),
        ("q of rank 3", small().random("q", &[4, 5, 8]), "q of shape [4, 5, 8] has 3 axes, must have 4"),
        ("v of rank 5", small().random("v", &[1, 2, 2, 7, 6]), "has 5 axes, must have 4"),
        ("mask of rank 0", small().zeros("mask", Dtype::U8, &[]), "has 0 axes, must have 1 to 4"),
        ("bias of rank 5", small().zeros("bias", Dtype::F32, &[1; 5]), "has 5 axes, must have 1 to 4"),
        ("gates of rank 2", small().random("gates", &[1, 4]), "has 2 axes, must have 1"),
        ("head counts", small().random("q", &[2, 3, 5, 8]), "3 query heads are not a multiple of 2"),
        ("no key heads", small().random("k", &[2, 0, 7, 8]).random("v", &[2, 0, 7, 6]), "multiple of 0"),
        ("batch of k", small().random("k", &[3, 2, 7, 8]), "k has shape [3, 2, 7, 8], expected [2, 2, 7, 8]"),
        ("features of k", small().random("k", &[2, 2, 7, 9]), "k has shape"),
        ("tokens of v", small().random("v", &[2, 2, 6, 6]), "v has shape"),
        (
            "mask keys",
            small().zeros("mask", Dtype::BOOL, &[5, 6]),
            "mask of shape [1, 1, 5, 6] does not broadcast",
        ),
        ("bias heads", small().random("bias", &[3, 1, 1]), "bias of shape [1, 3, 1, 1] does not broadcast"),
        ("too few slopes", small().random("slopes", &[3]), "slopes has 3 entries, expected 4"),
        ("too many sinks", small().random("sinks", &[5]), "sinks has 5 entries, expected 4"),
        ("no gates", small().random("gates", &[0]), "gates has 0 entries, expected 4"),
        ("one length", small().i32s("kv_lens", &[7]), "kv_lens has 1 entries, expected 2"),
        ("negative length", small().i32s("kv_lens", &[7, -3]), "kv_lens[1] is -3, must not be negative"),
        ("negative query length", small().i64s("q_lens", &[-1, 5]), "q_lens[0] is -1"),
        ("length beyond", small().i32s("kv_lens", &[8, 7]), "kv_lens[0] is 8, but the axis has 7"),
        ("query length beyond", small().i64s("q_lens", &[5, 1 << 40]), "q_lens[1] is 1099511627776"),
        ("three offsets", small().i64s("offsets", &[0; 3]), "offsets has 3 entries, expected 2"),
        ("D = 0", small().random("q", &[2, 4, 5, 0]).random("k", &[2, 2, 7, 0]), "give a scale"),
        (
            "endless rows",
            small().random("q", &[1, 1, 1 << 50, 0]).random("k", &[1, 1, 7, 0]).random("v", &[1, 1, 7, 1]),
            "the number of query rows is 1125899906842624",
        ),
        (
            "endless output",
            small().random("q", &[1, 1, 9, 1]).random("k", &[1, 1, 0, 1]).random("v", &[1, 1, 0, 1 << 60]),
            "the number of output elements",
        ),
    ];
    let folder = folder("wrong-tensors");
    for (what, file, part) in table {
        assert_refused(what, &folder, &run_bytes(&folder, &file.bytes(), None), part);
    }
}

#[test]
fn wrong_options_are_refused() {
    let table: &[(&str, &str)] = &[
        ("", "options: "),
        ("[]", "must be a JSON object"),
        ("{\"scale\": 1", "options: "),
        (r#"{"scal": 1}"#, "unknown field `scal`"),
        (r#"{"scale": 1, "scale": 2}"#, "duplicate field `scale`"),
        (r#"{"scale": "1"}"#, "scale: invalid type: string \"1\", expected f32"),
        (r#"{"scale": 1e39}"#, "scale is inf, must be finite"),
        (r#"{"softcap": 0}"#, "softcap is 0, must be finite and above 0"),
        (r#"{"softcap": -1}"#, "softcap is -1"),
        (r#"{"causal": 1}"#, "causal: invalid type: integer `1`, expected a boolean"),
        (r#"{"window": [-1, 0]}"#, "window: invalid value: integer `-1`"),
        (r#"{"window": [1]}"#, "window: invalid length 1"),
        (r#"{"position": "left"}"#, "position: must be \"top_left\", \"bottom_right\" or an integer"),
        (r#"{"position": 1.5}"#, "position: must be"),
        (r#"{"layout": "bldh"}"#, "layout: unknown variant `bldh`, expected `bhld` or `blhd`"),
        (r#"{"threads": 0}"#, "threads is 0, must be 1 to"),
        (r#"{"threads": 1000000}"#, "threads is 1000000, must be 1 to"),
        (r#"{"level": "sse"}"#, "level \"sse\" is unknown"),
        (r#"{"level": "sse", "reference": true}"#, "level \"sse\" is unknown"),
        (
            if cfg!(target_arch = "x86_64") { r#"{"level": "neon"}"# } else { r#"{"level": "avx2"}"# },
            "not available",
        ),
        (
            if cfg!(target_arch = "x86_64") {
                r#"{"level": "neonbf16"}"#
            } else {
                r#"{"level": "avx512bf16"}"#
            },
            "not available",
        ),
        (r#"{"precision": "fast"}"#, "\"fast\" is for BF16 tensors"),
        (r#"{"precision": "quick"}"#, "precision: unknown variant `quick`"),
        (r#"{"scores": "raw"}"#, "scores: unknown variant `raw`"),
        (r#"{"stats": 1}"#, "stats: invalid type: integer `1`, expected a boolean"),
    ];
    let folder = folder("wrong-options");
    let bytes = File::small().bytes();
    for (options, part) in table {
        assert_refused(options, &folder, &run_bytes(&folder, &bytes, Some(options)), part);
    }
    let folded = File::small().zeros("q", Dtype::F32, &[1 << 40, 0, 1 << 40, 8]);
    let result = run_bytes(&folder, &folded.bytes(), Some(r#"{"layout": "blhd"}"#));
    assert_refused("sizes that overflow", &folder, &result, "the number of query rows");
    let in_metadata = File { metadata: Some(r#"{"scal": 1}"#), ..File::small() };
    assert_refused(
        "metadata",
        &folder,
        &run_bytes(&folder, &in_metadata.bytes(), None),
        "unknown field `scal`",
    );
}

#[test]
fn wrong_files_are_refused() {
    let folder = folder("wrong-files");
    let whole = File::small().bytes();
    for length in [0, 4, 8, 100, whole.len() - 1] {
        let part = "not a safetensors file";
        assert_refused(
            &format!("{length} bytes"),
            &folder,
            &run_bytes(&folder, &whole[..length], None),
            part,
        );
    }
    let longer = [&whole[..], &[0]].concat();
    assert_refused("a byte too many", &folder, &run_bytes(&folder, &longer, None), "not a safetensors file");
    assert_refused(
        "text",
        &folder,
        &run_bytes(&folder, b"some text, long enough", None),
        "not a safetensors file",
    );

    let [input, output, none] = ["in.safetensors", "out.safetensors", "none"].map(|name| folder.join(name));
    fs::write(&input, &whole).expect("the input is written");
    let run = |input: &Path, output: &Path, options: Option<&Path>| {
        let mut arguments =
            vec![Path::new("run"), Path::new("--input"), input, Path::new("--output"), output];
        arguments.extend(options.into_iter().flat_map(|options| [Path::new("--options"), options]));
        headwise(&arguments)
    };
    assert_refused("no input", &folder, &run(&none, &output, None), "cannot read");
    assert_refused("a folder as input", &folder, &run(&folder, &output, None), "cannot read");
    assert_refused("no options", &folder, &run(&input, &output, Some(&none)), "cannot read");
    assert_refused("options in binary", &folder, &run(&input, &output, Some(&input)), "cannot read");
    assert_refused("no such folder", &folder, &run(&input, &none.join("out"), None), "cannot write");
    assert_refused("a folder as output", &folder, &run(&input, &folder, None), "not a regular file");
    assert_refused("no name", &folder, &run(&input, &folder.join(".."), None), "cannot write");
    let options = folder.join("options.json");
    fs::write(&options, "{}").expect("the options are written");
    let detour = folder.join("../wrong-files/in.safetensors");
    for (from, onto) in [(&input, &input), (&input, &detour), (&input, &options)] {
        let refused = run(from, onto, Some(&options));
        assert_refused("an input as output", &folder, &refused, "it is an input of this command");
    }
    assert_eq!(fs::read(&input).expect("it is still there"), whole);
}

#[test]
fn wrong_usage_is_refused() {
    for arguments in [&["run"][..], &["ran"], &["run", "--input", "x"], &["bench", "--shape", "small"], &[]] {
        let arguments: Vec<&Path> = arguments.iter().map(Path::new).collect();
        assert_eq!(headwise(&arguments).status.code(), Some(2), "{arguments:?}");
    }
}

#[test]
fn spoiled_files_never_panic() {
    let file = File::small().random("bias", &[4, 1, 7]).i64s("offsets", &[3, -2]).i32s("kv_lens", &[3, 0]);
    let bytes = File { metadata: Some(r#"{"window": [1, 2], "position": 3}"#), ..file }.bytes();
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut accepted = 0;
    for _ in 0..20_000 {
        let mut spoiled = bytes.clone();
        for _ in 0..=random(2) {
            let at = if random(4) == 0 { random(bytes.len()) } else { random(700) }; // the header, mostly
            spoiled[at] = match random(3) {
                0 => b'0' + random(10) as u8,
                1 => bytes[random(700)],
                _ => random(256) as u8,
            };
        }
        accepted += usize::from(headwise_cli::run::compute(&spoiled, None).is_ok());
    }
    assert!(accepted > 100, "only {accepted} files were valid: this tests nothing");
}
