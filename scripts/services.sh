#!/usr/bin/env bash
# sshd and Slurm for the tests of `hoploom launch`: installs Debian's where that is allowed, and starts none of them.
# Without them these tests say so and are skipped.
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin"

missing() {
  local program
  for program in sshd:openssh-server ssh:openssh-client slurmctld:slurm-wlm slurmd:slurm-wlm srun:slurm-wlm munged:munge; do
    command -v "${program%%:*}" >/dev/null || echo "${program##*:}"
  done | sort -u
}

packages=$(missing)
[ -z "$packages" ] && exit 0
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  # Debian starts what it installs, unless policy-rc.d forbids it (101); a policy that is there already stays.
  policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
  fi
  # shellcheck disable=SC2086  # one word per package
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $packages >/dev/null || true
  packages=$(missing)
  [ -z "$packages" ] && exit 0
fi
echo "the tests of hoploom launch on ssh and Slurm will be skipped; to run them, install:" $packages >&2
