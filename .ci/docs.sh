#!/usr/bin/env bash
# The documentation: no broken link, no missing item.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps
