"""The command that starts a cluster."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from hoploom.cli.command import Arguments, Command, add_option, read_up_to
from hoploom.config.extras import needs
from hoploom.deploy.cluster_file import EXECUTORS, Cluster
from hoploom.deploy.launch import executor_of, run, with_free_ports
from hoploom.deploy.programs import interface_note, processes, script_words
from hoploom.deploy.resolve import Overrides, read_cluster
from hoploom.errors import ConfigError


def _launch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "hoploom launch [options] CLUSTER -- train run.toml"
    parser.epilog = "After --, write `train run.toml`, or your own script and its arguments."
    parser.add_argument(
        "file",
        type=Path,
        metavar="CLUSTER",
        help="the cluster file, TOML or YAML; the YAML files of GLT's launcher work too",
    )
    parser.add_argument("--dry-run", action="store_true", help="print every command, and start nothing")
    text = "every process also logs to a file of its own in this folder, such as gpu1-trainer-0.log"
    parser.add_argument("--logs", type=Path, metavar="DIR", help=text)
    parser.add_argument(
        "--executor", choices=EXECUTORS, help="how to start the processes; overrides `executor` in the cluster file"
    )
    parser.add_argument("--master-addr", metavar="HOST", help="host for torchrun's rendezvous")
    text = "port for torchrun's rendezvous"
    add_option(parser, "--master-port", read_up_to(65535), metavar="PORT", help=text)


def _launch(arguments: Arguments) -> int:
    command: list[str] = arguments.behind
    script_words(command)  # before a file is read
    overrides = Overrides(arguments.executor, arguments.master_addr, arguments.master_port)
    cluster = read_cluster(arguments.file, overrides)
    if arguments.logs is not None and cluster.executor not in ("local", "ssh"):
        way_out = "leave it out: the cluster keeps the output of its jobs itself"
        raise ConfigError(f"--logs is for the executors local and ssh, this one is {cluster.executor}; {way_out}")
    if cluster.executor == "kubernetes":
        with needs("cluster"):
            from hoploom.deploy.kubernetes import manifests
        print(manifests(cluster, command), end="")
        return 0
    if arguments.dry_run:
        print(_dry_run(cluster, command))
        return 0
    if cluster.executor == "slurm":
        from hoploom.deploy.slurm import submit

        return submit(cluster, command)
    return run(cluster, command, arguments.logs)


def _dry_run(cluster: Cluster, command: Sequence[str]) -> str:
    if cluster.executor == "slurm":
        from hoploom.deploy.slurm import script

        return script(cluster, command).rstrip("\n")
    executor = executor_of(cluster)
    planned = processes(with_free_ports(cluster), command)
    shown = [f"# {process.label}\n{executor.shown(process)}" for process in planned]
    return "\n".join([*interface_note(cluster), *shown])


COMMANDS = {"launch": Command(_launch_arguments, _launch)}
