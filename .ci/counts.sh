#!/usr/bin/env bash
# Instructions of each kernel (benches/counts.rs, counted by valgrind) against benches/counts.txt: fails where one has grown by more
# than COUNTS_LIMIT (2) percent, for one that is not counted or not listed, and where an instruction is called. `--update` writes
# the list instead.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
list=benches/counts.txt limit=${COUNTS_LIMIT:-2}
apt_install valgrind jq binutils
cargo_tool gungraun-runner 0.20.0

# A vector instruction that is a function of its own was not inlined into code of its level, and is many times slower there: for
# that a closure that is called in two places is enough.
binary=$(cargo bench -q --bench counts --no-run --message-format=json | jq -r '.executable // empty')
calls=$(nm -C "$binary" | grep -E ' [tT] core::core_arch::(x86::(avx|fma)|aarch64|arm_shared)' | sort -u -k3) || true
[ -z "$calls" ] || fail "not inlined:"$'\n'"$calls"

mkdir -p "$target"
cargo bench -q --bench counts -- --output-format=json > "$target/counts.json"
{
  printf '# Instructions by level and kernel, with %s. Written by: .ci/counts.sh --update\n' "$(rustc -V | cut -d' ' -f1,2)"
  jq -r '"\(.function_name)/\(.id) \(.profiles[0].data.total.metrics.Ir.values.new)"' "$target/counts.json" | sort
} > "$target/counts.txt"
if [ "${1:-}" = --update ]; then
  cp "$target/counts.txt" $list
  cat $list
  exit
fi

diff <(head -1 $list) <(head -1 "$target/counts.txt") || echo "another compiler: what differs may be its doing"
awk -v limit="$limit" '
/^#/ { next }
NR == FNR { was[$1] = $2; next }
{ now[$1] = 1
  growth = was[$1] > 0 ? 100 * ($2 - was[$1]) / was[$1] : 100
  bad = growth > limit || $2 !~ /^[0-9]+$/
  verdict = bad ? "FAILED" : growth < -limit ? "fewer: --update" : "ok"
  printf "%-22s %10d -> %10d %+6.2f %%  %s\n", $1, was[$1], $2, growth, verdict
  if (bad) failed++; else passed++ }
END {
  for (name in was) if (!(name in now)) { print name ": not counted"; failed++ }
  printf "%d passed, %d failed\n", passed, failed
  exit failed > 0 || passed == 0 }' $list "$target/counts.txt"
