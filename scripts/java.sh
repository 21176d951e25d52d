#!/usr/bin/env bash
# Java 17 for the tests on Spark: installs Debian's where that is allowed. Without it these tests say so and are skipped.
set -euo pipefail
command -v java >/dev/null && exit 0
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  apt-get update -qq && apt-get install -qq -y openjdk-17-jre-headless >/dev/null && exit 0
fi
echo "java is missing: the tests on Spark will be skipped; install openjdk-17-jre-headless to run them" >&2
