#!/usr/bin/env bash
# Every level from one baseline build: here at the best level and at each below it, then under qemu as processors
# that lack the higher ones. qemu raises SIGILL on an instruction that its processor lacks: none may leak out of its dispatch.
# EXPECT_LEVEL tells the tests what must be detected; HEADWISE_LEVEL forces one below it, and the tests look that it did.
set -euo pipefail
source "$(dirname "$0")/lib.sh"

case $(uname -m) in
  x86_64) ;;
  aarch64 | arm64)                                                            # NEON and scalar; nothing to emulate
    levels=(scalar neon)
    if grep -m1 '^Features' /proc/cpuinfo | grep -qw bf16; then levels+=(neonbf16); fi
    for level in "${levels[@]}"; do
      run_tests EXPECT_LEVEL="${levels[-1]}" HEADWISE_LEVEL=$level CASES=150 cargo test -q --lib --tests
    done
    exit ;;
  *) fail "no levels are known for $(uname -m)" ;;
esac

# has FLAGS...: whether this processor has them all.
has() {
  local flag
  for flag; do grep -m1 '^flags' /proc/cpuinfo | grep -qw "$flag" || return 1; done
}

native=(scalar)
if has avx2 fma bmi1 bmi2 abm; then native+=(avx2); fi
if has avx2 fma avx512f avx512bw avx512cd avx512dq avx512vl; then native+=(avx512); fi
best=${native[-1]}
if [ "$best" = avx512 ] && has avx512_bf16; then
  native+=(avx512bf16)
  grep -q GenuineIntel /proc/cpuinfo || best=avx512bf16                       # Intel's dots are slow, and not chosen
fi
if [[ $best == avx512* ]] && has amx_tile amx_bf16; then native+=(amx) best=amx; fi
for level in avx2 avx512 avx512bf16 amx; do
  [[ " ${native[*]} " == *" $level "* ]] || echo "not run on this processor, which lacks it: $level"
done

export CASES=150
for level in "${native[@]}"; do
  # Not the slow tests that go through all levels by themselves, whatever is forced.
  tests=(--lib --tests -- --skip every_pair_of_lengths --skip within_the_error_budget)
  case $best-$level in
    "$level-$level") tests=(--test "$LEVEL_TESTS") ;;                         # test.sh has all tests at the best level
    *-avx512 | *-avx512bf16) tests=(--test "$LEVEL_TESTS" --test types) ;;    # and those are the same but for bf16
  esac
  run_tests EXPECT_LEVEL="$best" HEADWISE_LEVEL="$level" cargo test -q "${tests[@]}"
done

# emulated CPU LEVEL CASES
emulated() {
  run_tests CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="qemu-x86_64 -cpu $1" EXPECT_LEVEL="$2" CASES="$3" \
    cargo test -q --test "$LEVEL_TESTS"
}
apt_install qemu-user
haswell=Haswell,-pcid,-tsc-deadline,-x2apic,-hle,-invpcid,-rtm
emulated "$haswell" avx2 40
emulated "$haswell,-f16c" avx2 15                                             # no F16C instruction may leak
emulated Nehalem scalar 40
