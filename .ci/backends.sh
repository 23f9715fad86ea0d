#!/usr/bin/env bash
# The backends: their crates are no default members of the workspace, as candle takes minutes to build.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
run_tests cargo test -p headwise-candle -p headwise-ndarray
