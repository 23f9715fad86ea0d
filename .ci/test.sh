#!/usr/bin/env bash
# Every test at the best level of this machine, as README.md names it; the examples, which check what they compute; and that
# Cargo.lock is up to date.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
cargo metadata --locked --format-version 1 >/dev/null
run_tests cargo test
for example in examples/*.rs; do
  cargo run -q --profile test --example "$(basename "$example" .rs)"
done
