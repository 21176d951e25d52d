"""Write the batch script that starts servers and trainers on the nodes of a Slurm job, and submit it.

srun starts one torchrun per node, which starts and numbers the ranks as on other clusters. Slurm picks the nodes, so
the script finds the addresses: host i of the cluster is the job's node i. The script needs bash on the nodes, srun with
--overlap (Slurm 20.11), and a folder that all nodes and this host see.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hoploom.config.values import join_address, printable, split_address
from hoploom.deploy.cluster_file import Cluster, Process, SlurmOptions
from hoploom.deploy.programs import processes, script_words
from hoploom.errors import ConfigError

SERVE_DEADLINE = 600  # seconds until all servers serve: a large store is checked and mapped first
STOP_DEADLINE = 30  # seconds that servers get to finish requests in flight
# Jobs may share nodes, so a job's ports are computed from its id: (the first port, the number of ports).
MEETING_PORTS = (15000, 15000)
SERVER_PORTS = (10000, 5000)
NAME = "\0{}\0"  # stands for a value that only the job knows: its variable's name, between bytes that no word has
KNOWN_INSIDE = re.compile("\0(hosts\\[[0-9]+\\]|first)\0(:0(?![0-9]))?")  # :0 is a port that the job sets

# Functions of every script. `marks`, a folder on the first node, has a file per ready server and the first exit status.
FUNCTIONS = r"""
follow() {  # NODE: label its server's lines, and note that it is ready
  local line
  while IFS= read -r line || [ -n "$line" ]; do
    [[ $line == '{"ready": '* ]] && : >"$marks/$1"
    [ -e "$marks/stopping" ] && [[ $line == slurmstepd-*CANCELLED* ]] && continue  # stop_servers did that
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
serve() {  # NODE WORDS...: run a server on the node, in the background
  local node=$1
  shift
  ("environment_$node"
   "${step[@]}" --nodes=1 --ntasks=1 --nodelist="${hosts[node]}" "$@" 2>&1 | follow "$node"
   exit "${PIPESTATUS[0]}") &
  servers[$node]=$!
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
  sh -c 'eval "$trainer"' trainer "{first}" {port} 2>&1 | follow_trainers
status=${{PIPESTATUS[0]}}
[ "$status" -ne 0 ] && [ -s "$marks/failed" ] && status=$(<"$marks/failed")
stop_servers
exit "$status"
"""


def script(cluster: Cluster, command: Sequence[str]) -> str:
    """Return the batch script. It exports the variables of the cluster file, so that no command line shows them."""
    for name, given in (("options", cluster.slurm.options), ("srun", cluster.slurm.srun)):
        wrong = next((option for option in given if not option.startswith("-")), None)
        if wrong is not None:
            raise ConfigError(f"{cluster.file}: slurm.{name} has {wrong!r}; write each as Slurm does: --name=value")
    options, program = cluster.slurm, script_words(command)[0]
    has_folder = any("--container-workdir" in option for option in options.srun)
    if options.in_container and not has_folder and not program.startswith(("-", "/")):
        raise ConfigError(
            f"{cluster.file}: the script {program!r} is a relative path, but slurm.srun has no --container-workdir; "
            "mount the script's folder with --container-mounts and give it as --container-workdir, or give an absolute "
            "path inside the container"
        )
    hosts = tuple(replace(host, address=NAME.format(f"hosts[{node}]")) for node, host in enumerate(cluster.hosts))
    rendezvous = join_address(NAME.format("first"), split_address(cluster.rendezvous)[1])
    return "\n".join(_lines(replace(cluster, hosts=hosts, rendezvous=rendezvous), command)) + "\n"


def submit(cluster: Cluster, command: Sequence[str]) -> int:
    """Hand the script to sbatch, print how to follow the job, and return the exit code of sbatch."""
    text = script(cluster, command).encode(errors="surrogateescape")  # words that are not UTF-8 stay as their bytes
    try:
        code = subprocess.run(["sbatch"], input=text, check=False).returncode
    except FileNotFoundError as error:
        raise ConfigError(
            "there is no sbatch on this host; launch from a host that submits to Slurm, or print the script with "
            "--dry-run and submit it there"
        ) from error
    what = (
        f"sbatch ended with exit status {code}; its own lines say why, and [slurm] of the cluster file has its options"
        if code
        else f"the job prints to {cluster.slurm.output}; `squeue --me` shows its state, `scancel JOB` ends it"
    )
    print(f"hoploom: {what}", file=sys.stderr, flush=True)
    return code


def _lines(cluster: Cluster, command: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the script: options of sbatch, variables and functions, servers, then the trainers."""
    planned = processes(cluster, command)
    servers = [process for process in planned if process.is_server]
    trainers = [process for process in planned if not process.is_server]
    common = dict(set.intersection(*(set(process.environment.items()) for process in trainers)))
    yield "#!/bin/bash"
    yield f"# Written by `hoploom launch {printable(cluster.file)}`"
    yield from (f"#SBATCH {option}" for option in _sbatch(cluster))
    yield "set -u"
    yield from cluster.slurm.setup
    yield 'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")'
    yield "marks=$(mktemp -d) || exit"
    yield "trap 'rm -rf \"$marks\"' EXIT"
    yield "servers=()"
    yield f"trainers=({' '.join(_node(cluster, process) for process in trainers)})  # nodes, in the order of ranks"
    yield f"server_port={_port_of_job(SERVER_PORTS)}"
    yield from (f"export {assigned}" for assigned in sorted(_assigned(common)))
    yield f"step=({' '.join(_step(cluster.slurm))})"
    yield FUNCTIONS
    for server in servers:
        yield f"environment_{_node(cluster, server)}() {{ export {' '.join(_assigned(server.environment))}; }}"
    yield from (_started(cluster, process) for process in servers)
    cases = "\n".join(f"{rank}) {_trainer(cluster, process, common)} ;;" for rank, process in enumerate(trainers))
    end = "TRAINER"
    while end in cases.split("\n"):  # a word of several lines may have it
        end += "_"
    yield f"read -r -d '' trainer <<'{end}'"
    yield "unset trainer; first=$1 port=$2"
    yield "case $SLURM_PROCID in"
    yield cases
    yield "esac"
    yield f"{end}\nexport trainer"
    nodes = [f"${{hosts[{_node(cluster, process)}]}}" for process in trainers]
    port = str(split_address(cluster.rendezvous)[1] or _port_of_job(MEETING_PORTS))
    yield START.strip("\n").format(count=len(nodes), nodes=",".join(nodes), first=nodes[0], port=port)


def _sbatch(cluster: Cluster) -> Iterator[str]:
    """Yield the options of sbatch; the user's own options come last, so that they take precedence."""
    options = cluster.slurm
    yield f"--job-name={options.name}"
    yield f"--nodes={len(cluster.hosts)}"
    yield "--ntasks-per-node=1"
    yield f"--output={_escaped(options.output)}"
    named = {
        "partition": options.partition,
        "account": options.account,
        "time": options.time,
        "gpus-per-node": options.gpus,
        "cpus-per-task": options.cpus,
        "mem": options.memory,
    }
    yield from (f"--{name}={_escaped(str(value))}" for name, value in named.items() if value is not None)
    yield from options.options


def _step(options: SlurmOptions) -> Iterator[str]:
    """Yield the words of the srun command for a step. Steps share their nodes; each may use all the job's cores."""
    yield from ("srun", "--overlap", "--export=ALL", "--cpu-bind=quiet,none", "--input=none", "--ntasks-per-node=1")
    yield from map(shlex.quote, options.srun)


def _node(cluster: Cluster, process: Process) -> str:
    return str(cluster.hosts.index(process.host))


def _started(cluster: Cluster, process: Process) -> str:
    """Return the line of the script that starts a server, in the host's folder unless srun uses a container."""
    folder = [] if cluster.slurm.in_container else [f"--chdir={shlex.quote(process.folder)}"]
    return " ".join(["serve", _node(cluster, process), *folder, *map(_quoted, process.words)])


def _trainer(cluster: Cluster, process: Process, common: Mapping[str, str]) -> str:
    """Return the sh commands for the trainers of one node: change to the folder, set variables, run torchrun."""
    own = {name: value for name, value in process.environment.items() if common.get(name) != value}
    words = process.words
    at = words.index("--master-port")
    steps = [] if cluster.slurm.in_container else [f"cd {shlex.quote(process.folder)} || exit"]
    steps += [f"export {' '.join(_assigned(own))}"] if own else []
    quoted = [*map(_quoted, words[: at + 1]), '"$port"', *map(_quoted, words[at + 2 :])]
    return "; ".join([*steps, f"exec {' '.join(quoted)}"])


def _port_of_job(ports: tuple[int, int]) -> str:
    """Return a shell expression that computes a port from the job's id, so that jobs on a node use different ports."""
    return f"$(({ports[0]} + SLURM_JOB_ID % {ports[1]}))"


def _assigned(variables: Mapping[str, str]) -> list[str]:
    return [f"{name}={_quoted(value)}" for name, value in variables.items()]


def _quoted(word: str) -> str:
    """Quote a word for the shell. Addresses and ports that only the job knows become references to shell variables."""
    quoted, end = "", 0
    for found in KNOWN_INSIDE.finditer(word):
        port = ":${server_port}" if found[2] else ""
        quoted += (shlex.quote(plain) if (plain := word[end : found.start()]) else "") + f'"${{{found[1]}}}{port}"'
        end = found.end()
    return quoted + (shlex.quote(word[end:]) if word[end:] else "") or "''"


def _escaped(value: str) -> str:
    """Return a value quoted for an #SBATCH line, in which a backslash escapes quotes and backslashes."""
    if re.fullmatch(r"[\w@%+=:,./-]+", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
