"""A cluster on Slurm: the batch script that starts servers and trainers on the job's nodes, and who submits it.

One torchrun per node, by srun: it starts, watches and names the ranks as it does everywhere else, where plain srun
tasks would be a second way with its own errors. Slurm picks the nodes, so addresses are worked out inside the job:
host i of the cluster is the job's node i. Needs bash on the nodes, srun with --overlap (Slurm 20.11), and a folder
that all nodes and this host see.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hoploom.errors import ConfigError
from hoploom.launch import slurm_job
from hoploom.launch.cluster import Cluster, Process, SlurmOptions, split_address
from hoploom.launch.plan import processes
from hoploom.launch.resolve import RENDEZVOUS_PORT

SERVE_DEADLINE = 600  # seconds until all servers serve: a large store is checked and mapped first
STOP_DEADLINE = 30  # seconds that servers get to finish what is in flight
FIRST_PORT, NUM_PORTS = 15000, 15000  # where torchrun's processes meet, where no port is given: by the job's number
KNOWN_INSIDE = re.compile(r"\$\{hosts\[\d+\]\}|\$\{first\}|\$\{port\}")  # what only the job knows, as a shell writes it

# What every script does. `marks` is a folder of the first node: which servers serve, and how the first trainers failed.
FUNCTIONS = r"""
follow_server() {  # NODE: label its lines, and note that it serves
  local line
  while IFS= read -r line || [ -n "$line" ]; do
    [[ $line == "serving parts "* ]] && : >"$marks/$1"
    [ -e "$marks/stopping" ] && [[ $line == slurmstepd-*CANCELLED* ]] && continue  # that was us
    printf '%s/server | %s\n' "${hosts[$1]}" "$line"
  done
}
follow_trainers() {  # label each line by the node whose number srun puts before it, and note the first failure
  local line
  while IFS= read -r line || [ -n "$line" ]; do
    if [[ $line =~ ^\ *([0-9]+):\ ?(.*)$ ]]; then
      printf '%s/trainers | %s\n' "${hosts[${trainers[BASH_REMATCH[1]]}]}" "${BASH_REMATCH[2]}"
      continue
    fi
    if [[ $line =~ ^srun:\ error:.*Exited\ with\ exit\ code\ ([0-9]+) ]] && [ ! -e "$marks/failed" ]; then
      echo "${BASH_REMATCH[1]}" >"$marks/failed"
    fi
    printf '%s\n' "$line"
  done
}
serve() {  # NODE WORDS...
  local node=$1
  shift
  ("${step[@]}" --nodes=1 --ntasks=1 --nodelist="${hosts[node]}" "$@" 2>&1 | follow_server "$node"
   exit "${PIPESTATUS[0]}") &
  servers[node]=$!
}
wait_for_servers() {
  local node deadline=$((SECONDS + SERVE_DEADLINE))
  for node in "${!servers[@]}"; do
    until [ -e "$marks/$node" ]; do
      if ! kill -0 "${servers[node]}" 2>/dev/null; then
        echo "hoploom: the server on ${hosts[node]} ended before it served; its own lines say why"
        return 1
      elif [ "$SECONDS" -ge "$deadline" ]; then
        echo "hoploom: the server on ${hosts[node]} does not serve after SERVE_DEADLINE seconds"
        return 1
      fi
      sleep 0.2
    done
  done
}
stop_servers() {  # what does not end in time ends with the job
  local deadline=$((SECONDS + STOP_DEADLINE))
  [ "${#servers[@]}" -eq 0 ] && return
  : >"$marks/stopping"
  scancel --signal=TERM "$SLURM_JOB_ID"  # reaches the job's steps, which are the servers by now, but not this script
  while [ -n "$(jobs -r)" ] && [ "$SECONDS" -lt "$deadline" ]; do sleep 0.1; done
}
""".replace("SERVE_DEADLINE", str(SERVE_DEADLINE)).replace("STOP_DEADLINE", str(STOP_DEADLINE))

START = """
if ! wait_for_servers; then
  stop_servers
  exit 1
fi
"${{step[@]}}" --kill-on-bad-exit=1 --label --nodes={count} --ntasks={count} --nodelist="{nodes}" \\
  sh -c "$trainer" trainer "{first}" {port} 2>&1 | follow_trainers
status=${{PIPESTATUS[0]}}
[ "$status" -ne 0 ] && [ -s "$marks/failed" ] && status=$(<"$marks/failed")
stop_servers
exit "$status"
"""


def run(cluster: Cluster, command: Sequence[str]) -> int:
    """Submit the job and follow it to its end: its exit status is that of the trainers. Ctrl-C cancels the job."""
    return slurm_job.run(script(cluster, command))


def script(cluster: Cluster, command: Sequence[str]) -> str:
    """The batch script, as sbatch takes it."""
    for option in cluster.slurm.options:
        if not option.startswith("-"):
            raise ConfigError(f"{cluster.file}: slurm.options has {option!r}; write each as sbatch does: --name=value")
    return "\n".join(_lines(_inside(cluster), command)) + "\n"


def _inside(cluster: Cluster) -> Cluster:
    """The same cluster, with variables of the script for addresses."""
    hosts = tuple(replace(host, address=f"${{hosts[{node}]}}") for node, host in enumerate(cluster.hosts))
    return replace(cluster, hosts=hosts, rendezvous=f"${{first}}:{split_address(cluster.rendezvous)[1]}")


def _lines(cluster: Cluster, command: Sequence[str]) -> Iterator[str]:
    planned = processes(cluster, command)
    servers = [process for process in planned if process.is_server]
    trainers = [process for process in planned if not process.is_server]
    common = dict(set.intersection(*(set(process.environment.items()) for process in trainers)))
    yield "#!/bin/bash"
    yield f"# Written by `hoploom launch {cluster.file}`"
    yield from (f"#SBATCH {option}" for option in _sbatch(cluster))
    yield "set -u"
    yield from cluster.slurm.setup
    yield 'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")'
    yield "marks=$(mktemp -d) || exit"
    yield "trap 'rm -rf \"$marks\"' EXIT"
    yield "servers=()"
    yield f"trainers=({' '.join(_node(cluster, process) for process in trainers)})  # nodes, in the order of ranks"
    yield from (f"export {assigned}" for assigned in sorted(_assigned(common)))
    yield f"step=({' '.join(_step(cluster.slurm))})"
    yield FUNCTIONS
    yield from (_server(cluster, process) for process in servers)
    yield "read -r -d '' trainer <<'TRAINER'"
    yield "first=$1 port=$2"
    yield "case $SLURM_PROCID in"
    yield from (f"{rank}) {_trainer(cluster, process, common)} ;;" for rank, process in enumerate(trainers))
    yield "esac"
    yield "TRAINER"
    nodes = [process.host.address for process in trainers]
    port = _rendezvous_port(cluster)
    yield START.strip("\n").format(count=len(nodes), nodes=",".join(nodes), first=nodes[0], port=port)


def _sbatch(cluster: Cluster) -> Iterator[str]:
    options = cluster.slurm
    yield f"--job-name={options.name}"
    yield f"--nodes={len(cluster.hosts)}"
    yield "--ntasks-per-node=1"
    yield f"--output={options.output}"
    named = {
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time,
        "constraint": options.constraint,
        "reservation": options.reservation,
        "gpus-per-node": options.gpus,
        "cpus-per-task": options.cpus,
        "mem": options.memory,
    }
    yield from (f"--{name}={shlex.quote(str(value))}" for name, value in named.items() if value is not None)
    if options.exclusive:
        yield "--exclusive"
    yield from options.options


def _step(options: SlurmOptions) -> Iterator[str]:
    """What all of the job's steps have: they share their nodes, and each may use all cores that the job has there."""
    yield from ("srun", "--overlap", "--cpu-bind=quiet,none", "--input=none", "--ntasks-per-node=1")
    if options.container_image is not None:
        yield f"--container-image={shlex.quote(options.container_image)}"
        if options.container_mounts:
            yield f"--container-mounts={shlex.quote(','.join(options.container_mounts))}"
        if options.container_workdir is not None:
            yield f"--container-workdir={shlex.quote(options.container_workdir)}"


def _node(cluster: Cluster, process: Process) -> str:
    return str(cluster.hosts.index(process.host))


def _server(cluster: Cluster, process: Process) -> str:
    """Start one server; a container has folders of its own."""
    folder = [] if cluster.slurm.container_image else [f"--chdir={shlex.quote(process.folder)}"]
    words = ["serve", _node(cluster, process), *folder, "env", *_assigned(process.environment)]
    return " ".join([*words, *map(_quoted, process.words)])


def _trainer(cluster: Cluster, process: Process, common: Mapping[str, str]) -> str:
    """What sh does on one node: its own folder and variables, then torchrun."""
    own = {name: value for name, value in process.environment.items() if common.get(name) != value}
    words = list(process.words)
    words[words.index("--master-port") + 1] = "${port}"
    steps = [] if cluster.slurm.container_image else [f"cd {shlex.quote(process.folder)} || exit"]
    steps += [f"export {' '.join(_assigned(own))}"] if own else []
    return "; ".join([*steps, f"exec {' '.join(map(_quoted, words))}"])


def _rendezvous_port(cluster: Cluster) -> str:
    """Jobs that share a node must not meet at one port, so that without one given it is the job's own."""
    given = split_address(cluster.rendezvous)[1]
    return str(given) if given != RENDEZVOUS_PORT else f"$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))"


def _assigned(variables: Mapping[str, str]) -> list[str]:
    return [f"{name}={_quoted(value)}" for name, value in variables.items()]


def _quoted(word: str) -> str:
    """A word that a shell takes as it is, but for what only the job knows."""
    plain = [shlex.quote(text) if text else "" for text in KNOWN_INSIDE.split(word)]
    known = [f'"{found}"' for found in KNOWN_INSIDE.findall(word)] + [""]
    return "".join(text + found for text, found in zip(plain, known, strict=True)) or "''"
