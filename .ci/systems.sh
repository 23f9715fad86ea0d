#!/usr/bin/env bash
# Windows and macOS: clippy of all that users build there, libraries and commands, on a standard library that is checked from its
# source. Nothing is linked or run: the workflow on the public host does that.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
source .ci/debian.sh
debian_rust
export RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=$target/systems                     # -Z build-std, on stable
export CARGO_PROFILE_DEV_OPT_LEVEL=0 CARGO_PROFILE_DEV_DEBUG=0                # only whether it builds
for triple in x86_64-pc-windows-msvc aarch64-apple-darwin; do
  debian_clippy $triple -Z build-std=std,panic_unwind --workspace --lib --bins
done
