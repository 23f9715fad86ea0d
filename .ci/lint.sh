#!/usr/bin/env bash
# Format and clippy, for this machine's architecture (arm64.sh has the other one's).
set -euo pipefail
source "$(dirname "$0")/lib.sh"
status=0
cargo fmt --all --check || status=1
cargo clippy --workspace --all-targets -- -D warnings || status=1
exit $status
