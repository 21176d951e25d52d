#!/usr/bin/env bash
# Makes .venv. Debian keeps venv and Python.h in packages of their own: installs them where that is allowed.
set -euo pipefail
python=${1:-python3}

ready() {
  "$python" - <<'PY'
import ensurepip, os, sys, sysconfig
assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed"
assert os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")), "Python.h is missing"
PY
}

if ! ready 2>/dev/null; then
  if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    apt-get update -qq && apt-get install -qq -y python3-venv python3-dev >/dev/null
  fi
  ready || { echo "install python3-venv and python3-dev (Python 3.11 or newer), then run make again" >&2; exit 1; }
fi
"$python" -m venv .venv
