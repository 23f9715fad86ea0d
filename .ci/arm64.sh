#!/usr/bin/env bash
# NEON: the level tests cross-compiled for aarch64 and run under qemu, then clippy of the aarch64 code. The compiler is Debian's
# rustc-web with its arm64 standard library, unpacked under ARM64_PREFIX; rustup's toolchain stays the default one.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
prefix=${ARM64_PREFIX:-/opt/rust-arm64}
triple=aarch64-unknown-linux-gnu

if ! [ -x "$prefix/rustc" ]; then
  apt_update
  candidate() { apt-cache policy "$1" | sed -n 's/ *Candidate: //p'; }
  version=$(candidate rustc-web)                                              # 1.96.0+dfsg1-1~deb12u2
  arm=$(candidate libstd-rust-web-dev:arm64)
  [ -n "$version" ] && [ "$version" = "$arm" ] || fail "rustc-web is '$version' but arm64's library '$arm'"
  std=$(apt-cache depends "libstd-rust-web-dev=$version" | grep -o 'libstd-rust-web-[0-9][0-9.]*' | sort -u)
  llvm=$(apt-cache depends "$std=$version" | grep -o 'libllvm[0-9][0-9]*' | sort -u)
  apt_install "$llvm"

  rm -rf "$prefix"
  mkdir -p "$prefix/debs"
  chmod 777 "$prefix/debs"                                                    # apt downloads as its own user
  (
    cd "$prefix/debs"
    apt_get download "rustc-web=$version" "$std=$version" "rust-web-clippy=$version" \
      "libstd-rust-web-dev=$version" "libstd-rust-web-dev:arm64=$version"
    for deb in *.deb; do dpkg -x "$deb" "$prefix"; done
  )
  rm -rf "$prefix/debs"
  for tool in rustdoc clippy-driver rustc; do                                 # rustc last: it marks a whole prefix
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%s/usr/lib/x86_64-linux-gnu exec %s/usr/bin/%s "$@"\n' \
      "$prefix" "$prefix" "$tool" > "$prefix/$tool"
    chmod +x "$prefix/$tool"
  done
fi
apt_install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
"$prefix/rustc" -V
qemu-aarch64 --version | head -1

export RUSTC=$prefix/rustc RUSTDOC=$prefix/rustdoc CARGO_TARGET_DIR=$target/arm64
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
emulated() {
  run_tests CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -cpu $1 -L /usr/aarch64-linux-gnu" \
    EXPECT_LEVEL=neon cargo test -q --target $triple -p headwise --test "$LEVEL_TESTS"
}
emulated max
emulated cortex-a72                       # plain Armv8.0, without fp16, dotprod and bf16: SIGILL if one leaks out of its dispatch

# `cargo clippy` would take rustup's driver; this is what it does, with Debian's.
CLIPPY_ARGS=-Dwarnings__CLIPPY_HACKERY__ RUSTC_WORKSPACE_WRAPPER=$prefix/clippy-driver \
  cargo check --target $triple --target-dir "$CARGO_TARGET_DIR/clippy" --workspace --all-targets
