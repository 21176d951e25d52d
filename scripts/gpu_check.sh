#!/usr/bin/env bash
# Checks Hoploom on a machine with a GPU and no network: Python 3.12, torch 2.11, triton 3.6, torch-geometric, g++, cmake.
# Installs the wheels of scripts/gpu_wheels.sh into a folder of its own, builds the core, runs the tests that concern the
# device, compute-sanitizer where there is one, and the gpu benchmarks. Writes benchmarks/results/devices/gpu_NAME.json
# as it goes; exit status 1 if a test, a benchmark or compute-sanitizer failed or did not finish.
#   scripts/gpu_check.sh [NAME] [--tests-only | --benchmarks-only] [--minutes N] [--out FILE] [--commit HASH] [--rehearse]
# NAME: of the results, e.g. h200. --minutes: stop after so many (two calls, one with each "only", make one file).
# --commit: where the copy has no .git. --rehearse: everything on the CPU, in Triton's interpreter, with a tiny graph;
# writes build/gpu/gpu_NAME.json instead.
# PYTHON (python3) and WHEELS (build/gpu-wheels) may be set.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=${PYTHON:-python3}
wheels=${WHEELS:-build/gpu-wheels}
began=$(date +%s)

case " $* " in *" --help "* | *" -h "*) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
if [[ " $* " == *" --rehearse "* ]]; then
  export TRITON_INTERPRET=1
else
  unset TRITON_INTERPRET
  "$python" - <<'PY' || { echo "gpu_check: this machine cannot be checked; to try the script out on it: --rehearse" >&2; exit 2; }
import sys
try:
    import torch, torch_geometric, triton
except ImportError as error:
    sys.exit(f"gpu_check: {error}; set PYTHON to one that has torch, torch-geometric and triton")
if not torch.cuda.is_available():
    sys.exit(f"gpu_check: torch {torch.__version__} sees no CUDA device")
PY
fi

tag=$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
site=$root/build/gpu/site-$tag
if compgen -G "$wheels/*.whl" >/dev/null; then
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" "$wheels"/*.whl ||
    echo "gpu_check: $wheels does not fit $("$python" -V); going on with what that has" >&2
fi
export PYTHONPATH=$site:$root/src${PYTHONPATH:+:$PYTHONPATH}

# The core: an editable install has it already, and keeps it up to date; else built here and put beside the package.
installed() {
  "$python" -c "import sys, hoploom._core as c; sys.exit(c.__file__.startswith('$root/src'))" 2>/dev/null
}
if ! installed; then
  missing="run scripts/gpu_wheels.sh where there is a network, and bring $wheels along"
  nanobind=$("$python" -m nanobind --cmake_dir) || { echo "gpu_check: nanobind is missing; $missing" >&2; exit 2; }
  command -v cmake >/dev/null || { echo "gpu_check: cmake is missing" >&2; exit 2; }
  executable=$("$python" -c 'import sys; print(sys.executable)')
  core=build/gpu/core-$tag
  mkdir -p "$core"
  {
    cmake -S . -B "$core" -DCMAKE_BUILD_TYPE=Release -Dnanobind_DIR="$nanobind" -DPython_EXECUTABLE="$executable" &&
      cmake --build "$core" --parallel
  } >"$core/log" 2>&1 || { tail -n 40 "$core/log" >&2; exit 2; }
  cp "$core"/_core.*so src/hoploom/
fi
exec "$python" benchmarks/gpu_check.py "$@" --began "$began"
