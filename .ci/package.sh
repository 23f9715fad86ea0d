#!/usr/bin/env bash
# The crates as others get them: licences, bans and sources of all dependencies; the oldest versions that the manifests allow; each
# feature by itself, and none; and the packages as they would be published, each built from what it contains.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
apt_install jq
cargo_tool cargo-deny 0.20.2
export CARGO_PROFILE_DEV_OPT_LEVEL=0 CARGO_PROFILE_DEV_DEBUG=0               # only whether it builds

# Advisories need a database from the network: the workflow on the public host has them.
cargo fetch --locked
cargo deny --offline --all-features check licenses bans sources

# Every crate's features, one at a time. A crate without any is built as it is by the parts before.
cargo metadata --no-deps --format-version 1 | jq -r '.packages[] | .name as $name | .features | keys[] | "\($name) \(.)"' |
  while read -r crate feature; do
    cargo check -p "$crate" --no-default-features --features "$feature" </dev/null
    cargo check -p "$crate" --no-default-features </dev/null
  done

# In a copy, as it writes another Cargo.lock.
minimal=$target/minimal
rm -rf "$minimal"
mkdir -p "$minimal"
git ls-files -z | tar --null -T - -c | tar -x -C "$minimal"
(
  cd "$minimal"
  export RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=../minimal-target
  cargo update -q -Z direct-minimal-versions
  cargo check --workspace
)

# The crates depend on one another, and none need be on crates.io yet: they are resolved among themselves.
limit=$((256 * 1024)) status=0
# By name and version what is unpacked and built of them does not differ from that of a run before: it has to go.
packages=$target/packages
rm -rf "$packages"/package "$packages"/debug/.fingerprint/headwise* "${CARGO_HOME:-$HOME/.cargo}"/registry/src/-*
CARGO_TARGET_DIR=$packages cargo package --workspace --locked --allow-dirty
for crate in "$packages"/package/*.crate; do
  size=$(stat -c %s "$crate")
  printf '%s: %d files, %d bytes\n' "$(basename "$crate")" "$(tar -tzf "$crate" | wc -l)" "$size"
  [ "$size" -le "$limit" ] || { echo "larger than $limit bytes" >&2; status=1; }
  if tar -tzf "$crate" | grep -v '/\.cargo_vcs_info\.json$' | grep -E '\.(safetensors|gguf|json)$|/(tests|\.ci)/'; then
    echo "has test data in it" >&2
    status=1
  fi
done
exit $status
