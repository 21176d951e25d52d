"""The commands of a cluster: `launch` starts a cluster, and `serve` runs one server."""

import argparse
from pathlib import Path

from hoploom.cli import Arguments, Command, add_option, read_address, read_positive, read_seconds, read_up_to
from hoploom.config.values import parse_count
from hoploom.deploy.cluster_file import EXECUTORS
from hoploom.system import needs, num_cores


def _launch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "hoploom launch [options] CLUSTER -- train run.toml"
    parser.epilog = "After --, write `train run.toml`, or your own script and its arguments."
    text = "the cluster file, TOML or YAML; the YAML files of GLT's launcher work too"
    parser.add_argument("file", type=Path, metavar="CLUSTER", help=text)
    parser.add_argument("--dry-run", action="store_true", help="print every command, and start nothing")
    text = "how to start the processes; overrides `executor` in the cluster file"
    parser.add_argument("--executor", choices=EXECUTORS, help=text)
    parser.add_argument("--master-addr", metavar="HOST", help="host for torchrun's rendezvous")
    text = "port for torchrun's rendezvous"
    add_option(parser, "--master-port", read_up_to(65535), metavar="PORT", help=text)


def _launch(arguments: Arguments) -> int:
    from hoploom.deploy import launch, slurm
    from hoploom.deploy.programs import script_words
    from hoploom.deploy.resolve import Overrides, read_cluster

    command: list[str] = arguments.behind
    script_words(command)  # before a file is read
    overrides = Overrides(arguments.executor, arguments.master_addr, arguments.master_port)
    cluster = read_cluster(arguments.file, overrides)
    if cluster.executor == "kubernetes":
        with needs("cluster"):
            from hoploom.deploy.kubernetes import manifests
        print(manifests(cluster, command), end="")
        return 0
    if cluster.executor == "slurm":
        if not arguments.dry_run:
            return slurm.submit(cluster, command)
        print(slurm.script(cluster, command).rstrip("\n"))
        return 0
    if not arguments.dry_run:
        return launch.run_cluster(cluster, command)
    print("\n".join(launch.shell_lines(cluster, command)))
    return 0


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="a store's folder; it needs only the files of the parts served")
    text = "address to listen on; port 0 picks a free port (default: %(default)s)"
    add_option(parser, "--listen", read_address, default="127.0.0.1:0", metavar="HOST:PORT", help=text)
    text = "serve /metrics and /health over HTTP at this address"
    add_option(parser, "--metrics", read_address, metavar="HOST:PORT", help=text)
    text = "a part to serve; give it again for more (default: all)"
    add_option(parser, "--part", parse_count, appends=True, metavar="K", help=text)
    for flag, metavar, default, text in (
        ("--peers", "HOST:PORT,...", None, "servers of the other parts, to build whole batches"),
        ("--token-file", "FILE", None, "clients must show the token in this file"),
        ("--cert", "FILE", None, "TLS: the server's certificate"),
        ("--key", "FILE", None, "TLS: the key of the certificate"),
        ("--client-ca", "FILE", None, "TLS: clients must show a certificate of this CA"),
        ("--ca", "FILE", None, "TLS: the CA of the peers (default: --client-ca)"),
        ("--memory", "SIZE", "4GB", "memory for batches that are built and not yet sent (default: %(default)s)"),
        ("--store-memory", "SIZE", None, "memory for the store; the rest is read from disk (default: what is free)"),
        (
            "--cache",
            "SIZE",
            "",
            "cache for feature rows of other parts: a share (20%%) or a size (4GB) (default: none)",
        ),
        ("--fanouts", "N,N", "15,10,5", "the cache keeps the rows that batches with these need (default: %(default)s)"),
        ("--seeds", "SPLIT", None, "the split that the cache is filled for (default: train)"),
        ("--device", "GPU", None, "keep the store on this GPU, cuda or cuda:1, and sample there (default: on the CPU)"),
    ):
        parser.add_argument(flag, metavar=metavar, default=default, help=text)
    parser.add_argument("--insecure", action="store_true", help="allow other hosts to connect without TLS or a token")
    threads = str(num_cores())
    text = f"batches to build at the same time (default: one per core, here {threads})"
    add_option(parser, "--threads", read_positive, default=threads, metavar="N", help=text)
    for flag, seconds, text in (
        ("--timeout", "15", "seconds to wait for a peer"),
        ("--stall", "60", "seconds that a client may take to read before it is cut off"),
        ("--grace", "30", "seconds that running requests get when the server stops"),
    ):
        add_option(parser, flag, read_seconds, default=seconds, metavar="SECONDS", help=f"{text} ({seconds})")


def _serve(arguments: Arguments) -> int:
    from hoploom.cli.serving import serve

    return serve(arguments)


COMMANDS = {
    "launch": Command(_launch_arguments, _launch),
    "serve": Command(_serve_arguments, _serve, lambda a: f"opening {a.store}", "hoploom.cli.serving"),
}
