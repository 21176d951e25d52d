#!/usr/bin/env bash
# One wheel of ours with several versions of torch: in a virtual environment each it runs the command, a training in two
# processes, spawn and a loader, and fails at any line on stderr that is not expected. Trades a download of 3 GB and 7 GB
# of disk for each (torch of the index comes with CUDA) for what users really install. One that passes is removed.
#   scripts/torch_matrix.sh [VERSION ...]      WHEEL=dist/hoploom-...whl PYTHON=python3.12 scripts/torch_matrix.sh 2.9.1
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD/build/torch-matrix
python=${PYTHON:-.venv/bin/python}
[ $# -gt 0 ] || set -- 2.6.0 2.9.1 2.13.0 newest
mkdir -p "$root"
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

if [ -z "${WHEEL:-}" ]; then
  rm -rf "$root/wheel"
  "$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$root/wheel" .
  WHEEL=$(ls "$root"/wheel/*.whl)
fi

environment() { # version: a virtual environment with that torch and our wheel
  local venv=$root/$1 torch=torch==$1
  [ "$1" != newest ] || torch=torch
  if [ ! -e "$venv/ready" ]; then
    [ "$(df --output=avail -BG build | tail -1 | tr -dc 0-9)" -ge 10 ] ||
      { echo "torch $1 takes up to 7 GB in build/torch-matrix; free some disk until 10 GB are there" >&2; exit 1; }
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet "$torch" "$WHEEL"
    touch "$venv/ready"
  fi
  "$venv/bin/python" -m pip install --quiet --no-deps --force-reinstall "$WHEEL"
}

# The command's own lines; and what PyG says on import in a Python of yours, where torch has deprecated torch.jit.
expected='^(hoploom: |task: |epoch |opening |starting | *[0-9]+/[0-9]+ )|torch/jit/_script.py.*torch.jit.script. is deprecated|^  warnings.warn\($|^$'

check() { # what, command ...: it works, and says nothing unexpected
  local what=$1
  shift
  if ! "$@" >"$here/out" 2>"$here/err" || grep -vE "$expected" "$here/err" >"$here/unexpected"; then
    echo "torch $torch: $what fails:" >&2
    tail -n 30 "$here/out" >&2
    tail -n 30 "$here/err" >&2
    exit 1
  fi
}

for version; do
  environment "$version"
  here=$(mktemp -d)
  trap 'rm -rf "$here"' EXIT
  bin=$root/$version/bin
  torch=$("$bin/python" -c 'import torch; print(torch.__version__)')
  cd "$here"
  check "hoploom --help" "$bin/hoploom" --help
  check "generate" "$bin/hoploom" generate graph.store --nodes 2000 --degree 5 --features 8 --classes 4
  check "init" "$bin/hoploom" init run.toml --store graph.store
  check "train" "$bin/hoploom" train run.toml --processes 2 --set train.epochs=2
  check "resume" "$bin/hoploom" train run.toml --processes 2 --set train.epochs=3 --resume
  cat >spawned.py <<'PY'
import hoploom

def add(context):
    assert context.sum(context.rank) == 1

if __name__ == "__main__":
    hoploom.spawn(add, 2)
PY
  check "spawn" "$bin/python" spawned.py
  check "a loader" "$bin/python" - <<'PY'
import torch
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv
from hoploom import LinkNeighborLoader, NeighborLoader

n = 100  # node v links to v + 1 and v + 2, and its feature row is v
v = torch.arange(n)
edges = torch.stack([torch.cat([v, v]), torch.cat([(v + 1) % n, (v + 2) % n])])
data = Data(x=v[:, None].float(), y=v % 3, edge_index=edges)
seen = []
for batch in NeighborLoader(data, [2, 2], batch_size=16, num_workers=2):
    assert batch.x[:, 0].long().equal(batch.n_id)
    SAGEConv(1, 3)(batch.x, batch.edge_index).sum().backward()
    seen += batch.input_id.tolist()
assert sorted(seen) == list(range(n))
assert next(iter(LinkNeighborLoader(data, [2], neg_sampling="binary", batch_size=8))).edge_label.tolist() == [1.0] * 8 + [0.0] * 8
PY
  cd - >/dev/null
  rm -rf "$here"
  echo "torch $torch, $("$bin/python" --version), numpy $("$bin/python" -c 'import numpy; print(numpy.__version__)'): works"
  rm -rf "${root:?}/$version"
done
