#!/usr/bin/env bash
# The address sanitizer on the tests that reach most of the kernels, and the thread sanitizer on those that share work between
# threads, each at every level of this processor: the tests run through all levels themselves. Pages that trap, for what no
# sanitizer sees (assembly), are in tests/guard.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
source .ci/debian.sh
triple=x86_64-unknown-linux-gnu
[ "$(rustc -vV | sed -n 's/^host: //p')" = $triple ] || fail "needs an x86-64 Linux machine"

export RUSTC_BOOTSTRAP=1 CARGO_PROFILE_TEST_OPT_LEVEL=2                       # the flags, on stable
folder=$target/sanitize

# With --target, build scripts and macros stay as they are. Threads that end late look like leaks.
run_tests RUSTFLAGS="-Zsanitizer=address" ASAN_OPTIONS=detect_leaks=0 CARGO_TARGET_DIR="$folder/address" \
  cargo test --target $triple -p headwise --test levels --test quantised --test serving --test guard

# The standard library's locks must be seen, too: it is built from Debian's source, and rustup's toolchain has the runtime.
runtime=$(rustc --print sysroot)/lib/rustlib/$triple/lib/librustc-stable_rt.tsan.a
debian_rust
cp "$runtime" "$prefix/usr/lib/rustlib/$triple/lib/"
run_tests RUSTFLAGS="-Zsanitizer=thread" CARGO_TARGET_DIR="$folder/thread" \
  cargo test -Z build-std=std,panic_unwind,test --target $triple -p headwise --test serving --test faults
