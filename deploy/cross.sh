#!/usr/bin/env bash
# ./dev wheel --aarch64: the programs for aarch64, by Debian's cross compiler, in a root folder of its own: this system's packages stay
# as they are. Needs root, mmdebstrap and a network.
#
#   deploy/cross.sh build              build/aarch64, compiled
#   deploy/cross.sh wheel PURE DIST    the wheel, of that
#
# Nothing of it runs here; `qemu-aarch64-static -L build/aarch64-root` may. WEIGHTWIRE_CROSS_TESTS=ON: unit tests, too, for that.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
here=$PWD root=$PWD/build/aarch64-root
jobs=${WEIGHTWIRE_JOBS:-$(nproc)}
cache=${CCACHE_DIR:-$HOME/.cache/ccache}

# The tools are this machine's, the libraries arm64's: all of them can be installed together.
tools=(g++-aarch64-linux-gnu cmake ninja-build ccache pkg-config git ca-certificates protobuf-compiler protobuf-compiler-grpc
  libexpected-dev libcli11-dev nlohmann-json3-dev dpkg-dev python3 python3-wheel)
libraries=(libgrpc++-dev libprotobuf-dev libboost1.81-dev prometheus-cpp-dev libspdlog-dev libfmt-dev libxxhash-dev libzstd-dev
  libyaml-cpp-dev libsqlite3-dev libssl-dev libgtest-dev libgmock-dev)
# The same UCX as that of the other wheel.
ucx=$here/build/aarch64-ucx

make_root() {
  [ ! -e "$root/made" ] || return 0
  rm -rf "$root"
  mkdir -p build
  local packages=("${tools[@]}" "${libraries[@]/%/:arm64}")
  mmdebstrap --quiet --variant=minbase --architectures=amd64,arm64 --include="$(IFS=,; echo "${packages[*]}")" bookworm "$root"
  cp /etc/resolv.conf "$root/etc/resolv.conf"
  touch "$root/made"
}

get_ucx() {
  [ ! -e "$ucx/libucx" ] || return 0
  mkdir -p "$ucx"
  "$here/.venv/bin/python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --platform manylinux_2_28_aarch64 \
    -d "$ucx" "libucx-cu13>=1.22"
  "$here/.venv/bin/python" -m zipfile -e "$ucx"/libucx_cu13-*.whl "$ucx"
}

# The tree and the compiler's cache are at their own places in there. The mounts end with the command.
inside() {
  mkdir -p "$root$here" "$root$cache" "$cache"
  # shellcheck disable=SC2016
  unshare --mount --propagation private sh -euc '
    root=$1; mount --bind "$2" "$root$2"; mount --bind "$3" "$root$3"
    for name in proc dev sys; do mount --rbind "/$name" "$root/$name"; done
    here=$2 cache=$3; shift 3
    exec chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 CCACHE_DIR="$cache" CCACHE_BASEDIR="$here" \
      CCACHE_NOHASHDIR=1 ${http_proxy:+http_proxy="$http_proxy"} sh -euc "cd \"\$1\"; shift; exec \"\$@\"" sh "$here" "$@"' sh "$root" "$here" "$cache" "$@"
}

compile() {
  make_root
  get_ucx
  inside cmake -S . -B build/aarch64 -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake \
    -DWEIGHTWIRE_TESTS="${WEIGHTWIRE_CROSS_TESTS:-OFF}" -DWEIGHTWIRE_BENCH=OFF -Ducx_DIR="$ucx/libucx/lib/cmake/ucx" \
    -DWEIGHTWIRE_REVISION="$(git describe --always --dirty --abbrev=12 --exclude='*')"
  inside ninja -C build/aarch64 -j "$jobs" weightwired wwctl weightwire_checkpoint_abi weightwire_nccl weightwire_ucx
}

# The two may lie anywhere: what is in there is below the tree.
link() {
  rm -rf build/aarch64-dist
  mkdir build/aarch64-dist
  mv "$1" build/aarch64-dist
  inside python3 deploy/wheel.py build/aarch64 "build/aarch64-dist/$(basename "$1")" build/aarch64-dist aarch64
  mv build/aarch64-dist/*.whl "$2"
}

case ${1:-} in
  build) compile ;;
  wheel) link "$2" "$3" ;;
  *) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 64 ;;
esac
