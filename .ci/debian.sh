# Sourced by the parts that need what rustup cannot fetch here: Debian's rustc-web with arm64's standard library, clippy and the
# standard library's source, unpacked under DEBIAN_RUST. rustup's toolchain stays the default one.
prefix=${DEBIAN_RUST:-/opt/rust-debian}

# debian_rust: unpacks it, once, and makes cargo use it from then on.
debian_rust() {
  if ! [ -x "$prefix/rustc" ]; then
    apt_update
    candidate() { apt-cache policy "$1" | sed -n 's/ *Candidate: //p'; }
    local version arm std llvm deb tool
    version=$(candidate rustc-web)                                            # 1.96.0+dfsg1-1~deb12u2
    arm=$(candidate libstd-rust-web-dev:arm64)
    [ -n "$version" ] && [ "$version" = "$arm" ] || fail "rustc-web is '$version' but arm64's library '$arm'"
    std=$(apt-cache depends "libstd-rust-web-dev=$version" | grep -o 'libstd-rust-web-[0-9][0-9.]*' | sort -u)
    llvm=$(apt-cache depends "$std=$version" | grep -o 'libllvm[0-9][0-9]*' | sort -u)
    apt_install "$llvm"

    rm -rf "$prefix"
    mkdir -p "$prefix/debs"
    chmod 777 "$prefix/debs"                                                  # apt downloads as its own user
    (
      cd "$prefix/debs"
      apt_get download "rustc-web=$version" "$std=$version" "rust-web-clippy=$version" "rust-web-src=$version" \
        "libstd-rust-web-dev=$version" "libstd-rust-web-dev:arm64=$version"
      for deb in *.deb; do dpkg -x "$deb" "$prefix"; done
    )
    rm -rf "$prefix/debs"
    for tool in rustdoc clippy-driver rustc; do                               # rustc last: it marks a whole prefix
      printf '#!/bin/sh\nLD_LIBRARY_PATH=%s/usr/lib/x86_64-linux-gnu exec %s/usr/bin/%s "$@"\n' \
        "$prefix" "$prefix" "$tool" > "$prefix/$tool"
      chmod +x "$prefix/$tool"
    done
  fi
  "$prefix/rustc" -V
  export RUSTC=$prefix/rustc RUSTDOC=$prefix/rustdoc
}

# debian_clippy TARGET ARGUMENTS...: `cargo clippy` would take rustup's driver; this is what it does, with Debian's.
debian_clippy() {
  CLIPPY_ARGS=-Dwarnings__CLIPPY_HACKERY__ RUSTC_WORKSPACE_WRAPPER=$prefix/clippy-driver cargo check --target "$@"
}
