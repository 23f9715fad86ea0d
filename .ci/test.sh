#!/usr/bin/env bash
# Every test at the best level of this machine, as README.md names it; and that Cargo.lock is up to date.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
cargo metadata --locked --format-version 1 >/dev/null
run_tests cargo test
