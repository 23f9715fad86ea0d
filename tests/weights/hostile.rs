//! Files that were not written by a friend: they are refused, at once and without asking for memory.

use headwise::layer::{Checkpoint, LayerOptions, WeightsError};

use crate::{File, numbers};

fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[test]
fn headers_that_lie_are_refused() {
    let one = |shape: &str, offsets: &str, data: usize| {
        file(&format!(r#"{{"q":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#), data)
    };
    let two = |a: &str, b: &str| {
        let entry = |shape: usize, offsets: &str| {
            format!(r#"{{"dtype":"F32","shape":[{shape}],"data_offsets":{offsets}}}"#)
        };
        file(&format!(r#"{{"a":{},"b":{}}}"#, entry(2, a), entry(2, b)), 20)
    };
    let mut huge = u64::MAX.to_le_bytes().to_vec();
    huge.extend_from_slice(b"{}");
    let table: &[(&str, Vec<u8>)] = &[
        ("nothing", Vec::new()),
        ("less than a length", vec![1; 7]),
        ("a header longer than the file", 9u64.to_le_bytes().to_vec()),
        ("the longest header", huge),
        ("not JSON", file("{\"q\":", 0)),
        ("not UTF-8", [&1u64.to_le_bytes()[..], &[0xff]].concat()),
        ("deep JSON", file(&"[".repeat(100_000), 0)),
        ("data beyond the file", one("[2]", "[0,8]", 4)),
        ("data behind the last tensor", one("[1]", "[0,4]", 8)),
        ("a shape of more than its data", one("[3]", "[0,8]", 8)),
        ("a shape that overflows", one("[4294967296,4294967296,4294967296]", "[0,0]", 0)),
        ("a shape that wraps to its data", one("[9223372036854775810,2]", "[0,16]", 16)),
        ("the largest size", one("[18446744073709551615]", "[0,8]", 8)),
        ("a size beyond integers", one("[99999999999999999999]", "[0,8]", 8)),
        ("a negative size", one("[-2]", "[0,8]", 8)),
        ("offsets that fall", one("[2]", "[8,0]", 8)),
        ("the largest offsets", one("[2]", "[18446744073709551607,18446744073709551615]", 8)),
        ("tensors that overlap", two("[0,8]", "[4,12]")),
        ("a hole between tensors", two("[0,8]", "[12,20]")),
        ("an unknown type", file(r#"{"q":{"dtype":"X","shape":[1],"data_offsets":[0,4]}}"#, 4)),
    ];
    for (what, bytes) in table {
        match Checkpoint::new([&bytes[..]]) {
            Err(WeightsError::Format(_)) => {}
            other => panic!("{what}: {other:?}"),
        }
    }
}

/// An axis of 0 beside a huge one takes no bytes: it must not become a layer of so many outputs.
#[test]
fn huge_sizes_beside_none_are_refused() {
    let entry = |name: &str, shape: &str| {
        format!(r#""{name}":{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}"#)
    };
    let names = ["q.weight", "k.weight", "v.weight"].map(|name| entry(name, "[1152921504606846976,0]"));
    let header = format!("{{{},{}}}", names.join(","), entry("o.weight", "[0,1152921504606846976]"));
    let bytes = file(&header, 0);
    let checkpoint = Checkpoint::new([&bytes[..]]).expect("nothing is wrong with the file");
    let error = checkpoint.multi_head("", LayerOptions::new(1)).map(|_| ()).expect_err("no layer");
    assert!(matches!(error, WeightsError::Tensors(errors) if errors.len() == 4));
}

/// A good file cut anywhere, or with any byte of its header changed, is a layer or an error.
#[test]
fn broken_files_never_panic() {
    let mut good = File::default();
    for (seed, name) in ["q", "k", "v", "o"].into_iter().enumerate() {
        good = good.with(&format!("{name}.weight"), &[4, 4], &numbers(seed as u32, 16));
    }
    let good = good.bytes();
    let load = |bytes: &[u8]| {
        let checkpoint = Checkpoint::new([bytes])?;
        checkpoint.attention_layers();
        checkpoint.multi_head("", LayerOptions::new(2)).map(|_| ())
    };
    load(&good).expect("a layer");
    for len in 0..good.len() {
        load(&good[..len]).expect_err("a part of a file");
    }
    let header = good.len() - 4 * 64;
    let mut refused = 0;
    for at in 0..header {
        for byte in [0, b'0', b'9', b'"', b'[', b'}', b',', b'x', 0xff] {
            let mut bytes = good.clone();
            bytes[at] = byte;
            refused += usize::from(load(&bytes).is_err());
        }
    }
    assert!(refused > 5 * header, "only {refused} of {} were refused", 9 * header);
}
