#!/usr/bin/env bash
# Every fuzz target for FUZZ_SECONDS (30), from the seeds in tests/fuzz/seeds and what earlier runs here have found. A finding
# fails the part and is printed as base64: `base64 -d > FILE`, then `cargo fuzz run --fuzz-dir tests/fuzz TARGET FILE`.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
seconds=${FUZZ_SECONDS:-30}
fuzz=tests/fuzz

apt_install g++                                                               # libFuzzer is built from source
cargo_tool cargo-fuzz 0.13.2
toolchain=()
if rustup toolchain list 2>/dev/null | grep -q '^nightly'; then
  toolchain=(+nightly)
else
  export RUSTC_BOOTSTRAP=1                                                    # the sanitizer's flag, on stable
fi

status=0
cargo fmt --manifest-path $fuzz/Cargo.toml --check || status=1
cargo metadata --locked --manifest-path $fuzz/Cargo.toml --format-version 1 >/dev/null
# Crates in pieces, so that both cores compile the largest one. And without tracing what is compared, which takes two thirds of the
# time: the inputs of `attention` are numbers that a case is drawn from, and the seeds of `run` have its words.
flags=(--codegen-units 4 --no-trace-compares)
cargo "${toolchain[@]}" fuzz build "${flags[@]}" --fuzz-dir $fuzz

# fuzz TARGET MAX_LEN. Looking for leaks halves the speed: threads that end late look like leaks, and are looked into.
fuzz() {
  local corpus=$fuzz/corpus/$1 artifacts=$fuzz/artifacts/$1 file
  rm -rf "$artifacts"
  mkdir -p "$corpus" "$artifacts"
  cargo "${toolchain[@]}" fuzz run "${flags[@]}" --fuzz-dir $fuzz "$1" "$corpus" "$fuzz/seeds/$1" -- \
    -max_total_time="$seconds" -max_len="$2" -timeout=20 -rss_limit_mb=4096 -detect_leaks=0 -print_final_stats=1 -verbosity=0 || status=1
  for file in "$artifacts"/*; do
    [ -f "$file" ] || continue
    status=1
    printf '%s:\n' "$file"
    base64 -w 0 "$file"
    echo
  done
}
fuzz attention 1024
fuzz run 2048
exit $status
