#!/usr/bin/env bash
# NEON: the level tests cross-compiled for aarch64 and run under qemu, then clippy of what differs there.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
source .ci/debian.sh
triple=aarch64-unknown-linux-gnu
debian_rust
apt_install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
qemu-aarch64 --version | head -1

export CARGO_TARGET_DIR=$target/arm64
# The checks of a debug build are made on this machine's architecture; here they would take half of the time.
export CARGO_PROFILE_TEST_DEBUG_ASSERTIONS=false CARGO_PROFILE_TEST_OVERFLOW_CHECKS=false
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
# emulated CPU LEVEL CASES TESTS...
emulated() {
  local cpu=$1 level=$2 cases=$3
  shift 3
  run_tests CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -cpu $cpu -L /usr/aarch64-linux-gnu" \
    EXPECT_LEVEL="$level" CASES="$cases" cargo test -q --target $triple -p headwise "$@"
}
emulated max neonbf16 100 --test "$LEVEL_TESTS" --test types
emulated cortex-a72 neon 40 --test "$LEVEL_TESTS"   # plain Armv8.0, without fp16, dotprod and bf16: SIGILL if one leaks out of its dispatch

debian_clippy $triple --target-dir "$CARGO_TARGET_DIR/clippy" -p headwise-kernels -p headwise --all-targets
