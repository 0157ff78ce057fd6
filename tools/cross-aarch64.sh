#!/usr/bin/env bash
# Builds and tests for aarch64-unknown-linux-gnu (the Orin's processor) on an x86-64 Debian-like machine:
#
#     tools/cross-aarch64.sh build
#     tools/cross-aarch64.sh test
#     tools/cross-aarch64.sh test-programs cli:: pack::
#     tools/cross-aarch64.sh program tegu run "What is gravity?"
#
# Any cargo command works; programs run under qemu as a Cortex-A76, which has what an Orin core has (NEON, dot product,
# f16, LSE) and nothing it lacks (no SVE, no int8 matrix product).
#
# rustup's compiler has no standard library for this target without rustup's own server, so the compiler is Debian's
# `rustc-web`, with Debian's arm64 library of the same version. Both are unpacked into a cache folder, not installed,
# and no dpkg architecture is added: only the cross linker, its libc and qemu are installed as packages.
set -euo pipefail

cache=${TEGU_CROSS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tegu-cross-aarch64}
target=aarch64-unknown-linux-gnu

# apt drops its rights while it downloads unless told not to, and then cannot write into the cache folder.
apt() { apt-get -qq -o APT::Sandbox::User=root -o Acquire::Retries=3 "$@"; }

install_linker_and_qemu() {
  command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64 >/dev/null &&
    [ -e /usr/aarch64-linux-gnu/lib/libc.so.6 ] && return
  apt install -y --no-remove --no-install-recommends gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user >/dev/null
}

# Fetches the compiler for this machine, and the target's library by way of a package list of its own.
unpack_compiler() {
  rm -rf "$cache/parts" "$cache/sysroot"
  mkdir -p "$cache/parts/native/partial" "$cache/parts/lists/partial" "$cache/sysroot"
  apt install -y --download-only --reinstall --no-remove --no-install-recommends \
    -o Dir::Cache::archives="$cache/parts/native" rustc-web >/dev/null
  local version
  version=$(dpkg-deb -f "$cache"/parts/native/rustc-web_*.deb Version)
  local foreign=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State::Lists="$cache/parts/lists")
  apt "${foreign[@]}" update
  (cd "$cache/parts" && apt "${foreign[@]}" download "libstd-rust-web-dev=$version")
  local package
  for package in "$cache"/parts/native/*.deb "$cache"/parts/*.deb; do
    dpkg-deb -x "$package" "$cache/sysroot"
  done
}

# The unpacked tools find their libraries and sysroot only when told: one wrapper serves both names.
write_wrappers() {
  cat >"$cache/rustc" <<WRAPPER
#!/bin/sh
export LD_LIBRARY_PATH="$cache/sysroot/usr/lib/x86_64-linux-gnu"
exec "$cache/sysroot/usr/bin/\${0##*/}" --sysroot "$cache/sysroot/usr" "\$@"
WRAPPER
  chmod +x "$cache/rustc"
  ln -sf rustc "$cache/rustdoc"
}

if [ ! -e "$cache/ready" ]; then
  mkdir -p "$cache"
  echo "cross-aarch64: setting up in $cache" >&2
  apt update
  install_linker_and_qemu
  unpack_compiler
  write_wrappers
  rm -rf "$cache/parts"
  touch "$cache/ready"
else
  # The cache may outlive the packages, when only the home folder is kept.
  install_linker_and_qemu || { apt update && install_linker_and_qemu; }
fi

export RUSTC="$cache/rustc" RUSTDOC="$cache/rustdoc"
export CARGO_BUILD_TARGET=$target CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target/cross}
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
runner="qemu-aarch64 -cpu cortex-a76 -L /usr/aarch64-linux-gnu"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=$runner
if [ "${1:-}" = test-programs ]; then
  # Native tests that start the programs drive the emulated ones: an emulator that is cloned while its other threads
  # hold its locks can hang, so no emulated test starts children.
  cargo test --no-run --test main
  programs=$(realpath "$CARGO_TARGET_DIR")/$target/debug
  unset RUSTC RUSTDOC CARGO_BUILD_TARGET CARGO_TARGET_DIR
  shift
  TEGU_TEST_PROGRAMS=$programs TEGU_TEST_RUNNER=$runner exec cargo test --release --test main -- "$@"
fi
if [ "${1:-}" = program ]; then
  # One of the programs that the tests were built with.
  program=$CARGO_TARGET_DIR/$target/debug/$2
  shift 2
  exec $runner "$program" "$@"
fi
exec cargo "$@"
