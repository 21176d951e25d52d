#!/usr/bin/env bash
# Downloads what a GPU machine without a network may lack into a folder (build/gpu-wheels): the wheels that building the
# core and running the tests need beside Python 3.12, torch, torch-geometric, triton, numpy, g++ and cmake.
# pyarrow, duckdb, ibis and cryptography stay behind: opening, sampling, training and the gpu tests import none of them.
#   scripts/gpu_wheels.sh [FOLDER]      PYTHON=python3.11 scripts/gpu_wheels.sh   # any Python that has pip
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-build/gpu-wheels}
python=${PYTHON:-python3}
limit=$((64 * 1024 * 1024))
names="nanobind ninja safetensors tqdm torchmetrics lightning-utilities packaging pytest pytest-timeout iniconfig pluggy Pygments hypothesis sortedcontainers"

mkdir -p "$folder"
pins=$folder/pins.txt
for name in $names; do
  grep -i "^$name==" constraints.txt || { echo "$name has no line in constraints.txt; add one" >&2; exit 1; }
done >"$pins"

platforms=()
for version in 2_28 2_27 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${version}_x86_64"); done
for name in manylinux2014 manylinux2010 manylinux1; do platforms+=(--platform "${name}_x86_64"); done
rm -f "$folder"/*.whl # two versions of one package would stop the install
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  "${platforms[@]}" --dest "$folder" --requirement "$pins"

bytes=$(cat "$folder"/*.whl | wc -c)
echo "$folder: $(wc -l <"$pins") wheels, $((bytes / 1024)) KiB"
if [ "$bytes" -gt "$limit" ]; then
  echo "that is more than 64 MiB, which is what some machines take along" >&2
  exit 1
fi
