//! Any file and any options: `headwise run` answers or refuses, and never panics, hangs or takes memory
//! without end.
//!
//! An even first byte: the rest is a length, that many bytes of options, and the file, all as they are. An
//! odd one: the rest is numbers that a file and options are put together from, right but for a few slips.
#![no_main]

use std::fmt::Write;

use headwise_cli::case::Draw;
use headwise_cli::{Failure, run};
use libfuzzer_sys::fuzz_target;
use safetensors::SafeTensors;

fuzz_target!(|bytes: &[u8]| {
    match bytes {
        [mode, length, rest @ ..] if mode % 2 == 0 => {
            let (options, file) = rest.split_at((*length as usize).min(rest.len()));
            let options = String::from_utf8_lossy(options);
            check(file, (!options.is_empty()).then_some(&*options));
        }
        [_, rest @ ..] => {
            let mut rest = rest.iter();
            let mut next = || u32::from(*rest.next().unwrap_or(&0));
            let mut draw = Draw(&mut next);
            let options = options(&mut draw);
            check(&file(&mut draw, options.contains("blhd")), Some(&options));
        }
        [] => {}
    }
});

/// The answer is a file with a complete `out`, a refusal is one line.
fn check(file: &[u8], options: Option<&str>) {
    match run::compute(file, options) {
        Ok(answer) => {
            let answer = SafeTensors::deserialize(&answer).expect("a file of ours");
            let (q, v) = SafeTensors::deserialize(file)
                .and_then(|file| Ok((file.tensor("q")?.shape().to_vec(), file.tensor("v")?.shape().to_vec())))
                .expect("it was read before");
            assert_eq!(answer.tensor("out").expect("always there").shape(), [q[0], q[1], q[2], v[3]]);
        }
        Err(error) => {
            let line = Failure::usage(error).line;
            assert!(!line.is_empty() && !line.contains(char::is_control), "{line:?}");
        }
    }
}

/// One of the texts, the first for a 0.
fn pick<'a>(draw: &mut Draw<'_>, texts: &[&'a str]) -> &'a str {
    texts[draw.below(texts.len())]
}

/// A JSON object; one value in a while is wrong.
fn options(draw: &mut Draw<'_>) -> String {
    let values: [(&str, &[&str]); 13] = [
        ("layout", &["\"bhld\"", "\"blhd\"", "\"lbhd\""]),
        ("scale", &["0.125", "0", "-1e38", "1e39", "null", "\"one\""]),
        ("softcap", &["50.0", "1e-30", "0", "-1"]),
        ("causal", &["true", "false", "1"]),
        ("window", &["[2, 1]", "[null, 0]", "[18446744073709551615, null]", "[-1, 0]", "[1]"]),
        ("position", &["\"top_left\"", "\"bottom_right\"", "3", "-9223372036854775808", "1.5"]),
        ("threads", &["1", "2", "3", "0", "1025"]),
        (
            "level",
            &[
                "\"scalar\"",
                "\"avx2\"",
                "\"avx512\"",
                "\"neon\"",
                "\"amx\"",
                "\"avx512bf16\"",
                "\"neonbf16\"",
                "\"sse\"",
            ],
        ),
        ("precision", &["\"exact\"", "\"fast\""]),
        ("lse", &["true", "false"]),
        ("scores", &["\"weights\"", "\"scaled\"", "\"capped\"", "\"biased\"", "\"all\""]),
        ("stats", &["false", "true"]),
        ("reference", &["true", "false"]),
    ];
    let mut text = String::from("{");
    for (key, values) in values {
        if draw.below(4) == 1 {
            let value = pick(draw, values);
            let comma = if text.len() > 1 { "," } else { "" };
            let _ = write!(text, "{comma}\"{key}\":{value}"); // a string takes all
        }
    }
    text + pick(draw, &["}", "}", "}", "}", "}", "}", ",\"heads\":1}", ""])
}

/// A safetensors file; a size, type or place in a while is wrong.
fn file(draw: &mut Draw<'_>, tokens_first: bool) -> Vec<u8> {
    let mut size = |from: usize, n: usize| from + draw.below(n);
    let (b, hk, group, lq, lk, d, dv) =
        (size(1, 3), size(1, 3), size(1, 4), size(1, 20), size(1, 40), size(1, 20), size(1, 20));
    let hq = hk * group;
    let broadcast = |draw: &mut Draw<'_>| {
        let full = [b, hq, lq, lk].map(|n| if draw.below(3) == 1 { 1 } else { n });
        full[draw.below(4)..].to_vec()
    };
    let mut tensors = vec![
        ("q", "F32", vec![b, hq, lq, d]),
        ("k", "F32", vec![b, hk, lk, d]),
        ("v", "F32", vec![b, hk, lk, dv]),
    ];
    if tokens_first {
        tensors.iter_mut().for_each(|(_, _, shape)| shape.swap(1, 2));
    }
    for (name, dtypes) in [("mask", ["BOOL", "U8"]), ("bias", ["F32", "F32"])] {
        if draw.below(3) == 1 {
            tensors.push((name, pick(draw, &dtypes), broadcast(draw)));
        }
    }
    for (name, dtypes, n) in [
        ("slopes", ["F32", "F32"], hq),
        ("sinks", ["F32", "F32"], hq),
        ("gates", ["F32", "F32"], hq),
        ("kv_lens", ["I32", "I64"], b),
        ("q_lens", ["I32", "I64"], b),
        ("offsets", ["I32", "I64"], b),
    ] {
        if draw.below(4) == 1 {
            tensors.push((name, pick(draw, &dtypes), vec![n]));
        }
    }
    let (mut header, mut data) = (String::from("{"), Vec::new());
    for (name, mut dtype, mut shape) in tensors {
        let slip = draw.below(40);
        let axis = draw.below(shape.len());
        match slip {
            1 => shape[axis] = [0, 1, 7, 1 << 20, 1 << 40, usize::MAX][draw.below(6)],
            2 => dtype = pick(draw, &["F16", "BF16", "F64", "I8", "BOOL", "I64", "F4", "F32"]),
            3 => _ = shape.remove(axis),
            4 => shape.push(1),
            _ => {}
        }
        let width = match dtype {
            "F32" | "I32" => 4,
            "I64" | "F64" => 8,
            "F16" | "BF16" => 2,
            _ => 1,
        };
        let bytes = shape.iter().fold(width, |n: usize, &size| n.saturating_mul(size));
        let (start, end) = (data.len(), data.len().saturating_add(bytes));
        let comma = if header.len() > 1 { "," } else { "" };
        let place = format!("\"shape\":{shape:?},\"data_offsets\":[{start},{end}]");
        let _ = write!(header, "{comma}\"{name}\":{{\"dtype\":\"{dtype}\",{place}}}"); // a string takes all
        let plain = draw.below(3) > 0;
        data.extend((0..bytes.min(1 << 16)).map(|at| match dtype {
            "F32" if plain && at % 4 == 3 => [0x3f, 0xbf, 0x3e, 0xbe][draw.below(4)], // of usual size
            "I32" | "I64" if plain && at % width > 0 => 0,
            _ => draw.below(256) as u8,
        }));
    }
    header.push('}');
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.extend(data);
    file
}
