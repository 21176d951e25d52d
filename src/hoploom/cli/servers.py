"""The command that serves parts of a store: what it takes. What it does is apart, as it imports torch."""

import argparse
from pathlib import Path

from hoploom.cli.command import Arguments, Command, add_option, read_address, read_positive, read_seconds
from hoploom.config.values import parse_count
from hoploom.system import num_cores

STALL, GRACE = "60", "30"  # seconds


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="a store's folder; it needs only the files of the parts served")
    add_option(
        parser,
        "--listen",
        read_address,
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="address to listen on; port 0 picks a free port (default: %(default)s)",
    )
    parser.add_argument("--peers", metavar="HOST:PORT,...", help="servers of the other parts, to build whole batches")
    for flag, metavar, text in (
        ("--token-file", "FILE", "clients must show the token in this file"),
        ("--cert", "FILE", "TLS: the server's certificate (`hoploom certs` makes one)"),
        ("--key", "FILE", "TLS: the key of the certificate"),
        ("--client-ca", "FILE", "TLS: clients must show a certificate of this CA"),
        ("--ca", "FILE", "TLS: the CA of the peers (default: --client-ca)"),
        ("--seeds", "SPLIT", "the split that the cache is filled for (default: train)"),
    ):
        parser.add_argument(flag, metavar=metavar, help=text)
    text = "serve /metrics and /health over HTTP at this address"
    add_option(parser, "--metrics", read_address, metavar="HOST:PORT", help=text)
    text = "check the files of the store against their checksums in the background; stop if one is damaged"
    parser.add_argument("--verify", action="store_true", help=text)
    parser.add_argument("--insecure", action="store_true", help="allow other hosts to connect without TLS or a token")
    parser.add_argument(
        "--memory",
        default="4GB",
        metavar="SIZE",
        help="memory for batches that are built and not yet sent (default: %(default)s)",
    )
    text = "for a part larger than memory: how much of the store to hold, the rest is read from disk when needed"
    parser.add_argument("--store-memory", metavar="SIZE", help=f"{text} (default: what is free)")
    parser.add_argument(
        "--cache",
        default="",
        metavar="SIZE",
        help="cache for feature rows of other partitions: a share (20%%) or a size (4GB); default: no cache",
    )
    parser.add_argument(
        "--fanouts",
        default="15,10,5",
        metavar="N,N",
        help="fanouts of your training; the cache keeps the rows that such batches need most (default: %(default)s)",
    )
    text = "a part to serve; give it again for more (default: all)"
    add_option(parser, "--part", parse_count, appends=True, metavar="K", help=text)
    threads = str(num_cores())
    add_option(
        parser,
        "--threads",
        read_positive,
        default=threads,
        metavar="N",
        help=f"batches to build at the same time (default: one per core, here {threads})",
    )
    for flag, seconds, text in (
        ("--timeout", "15", "seconds to wait for a peer"),
        ("--stall", STALL, "seconds that a client may take to read before it is cut off"),
        ("--grace", GRACE, "seconds that running requests get when the server stops"),
    ):
        add_option(parser, flag, read_seconds, default=seconds, metavar="SECONDS", help=f"{text} ({seconds})")


def _serve(arguments: Arguments) -> int:
    from hoploom.cli.serving import serve

    return serve(arguments)


COMMANDS = {"serve": Command(_serve_arguments, _serve, lambda a: f"opening {a.store}", "hoploom.cli.serving")}
