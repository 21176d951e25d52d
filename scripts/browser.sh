#!/usr/bin/env bash
# Chromium for the tests that look at our pages: installs Debian's where that is allowed. Without it these tests say so
# and are skipped.
set -euo pipefail
command -v chromium >/dev/null && exit 0
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium >/dev/null && exit 0
fi
echo "chromium is missing: the tests in a browser will be skipped; install it to run them" >&2
