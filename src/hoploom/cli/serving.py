"""The command that serves parts of a store to other processes."""

import argparse
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from hoploom.cli.command import Arguments, Command, fanouts_of, seeds_of
from hoploom.config.extras import needs
from hoploom.config.values import as_int, as_number, parse_bytes, read_addresses, split_address
from hoploom.errors import ConfigError
from hoploom.ranks.stopping import put_back, take_over
from hoploom.serve.ready import FOR_PEOPLE, Ready
from hoploom.serve.security import ServerSecurity, check_listen, read_ca, read_server_security, towards_peers
from hoploom.store.disk import held_parts
from hoploom.store.format import read_manifest
from hoploom.store.row_cache import read_size
from hoploom.system import num_cores

with needs("cluster"):
    from hoploom.serve.graph_server import BatchOptions, GraphServer
    from hoploom.serve.metrics import MetricsEndpoint
    from hoploom.serve.server import GRACE, LOOK_UP, Server, ServerLimits


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="the store's folder; only that of the parts served must be there")
    parser.add_argument("--part", type=int, action="append", metavar="K", help="a part to serve (default: all)")
    parser.add_argument(
        "--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="port 0: any (default: %(default)s)"
    )
    parser.add_argument(
        "--peers", metavar="HOST:PORT,...", help="servers of the other parts, to make whole batches with"
    )
    parser.add_argument("--token-file", metavar="FILE", help="who asks must show the token in it")
    parser.add_argument("--cert", metavar="FILE", help="TLS: the server's certificate (hoploom certs)")
    parser.add_argument("--key", metavar="FILE", help="TLS: its key")
    parser.add_argument("--client-ca", metavar="FILE", help="TLS: who asks must show a certificate of it")
    parser.add_argument("--ca", metavar="FILE", help="TLS: what peers are known by (default: --client-ca)")
    parser.add_argument("--insecure", action="store_true", help="listen beyond loopback without TLS and token")
    parser.add_argument("--metrics", metavar="HOST:PORT", help="serve /metrics and /health over HTTP here")
    parser.add_argument("--threads", type=int, default=num_cores(), metavar="N", help="batches made at once")
    parser.add_argument("--memory", default="4GB", help="for batches made and not yet sent (default: %(default)s)")
    parser.add_argument("--cache", default="", metavar="SIZE", help="of other parts' rows: 20%% or 4GB (default: none)")
    parser.add_argument("--fanouts", default="15,10,5", help="of batches that the cache is for (default: %(default)s)")
    parser.add_argument("--seeds", metavar="SPLIT", help="what such batches start from (default: train)")
    parser.add_argument("--timeout", type=float, default=15.0, help="seconds to wait for a peer (default: %(default)g)")
    parser.add_argument(
        "--stall",
        type=float,
        default=ServerLimits.stall,
        help="seconds for a client to read what is sent, or it is cut off",
    )
    parser.add_argument("--grace", type=float, default=GRACE, help="seconds for requests under way at a stop")


def _serve(arguments: Arguments) -> int:
    security = read_server_security(arguments.token_file, arguments.cert, arguments.key, arguments.client_ca)
    host, _ = split_address(arguments.listen)
    _warn(check_listen(host, security, insecure=arguments.insecure))
    limits = ServerLimits(as_number("--stall", arguments.stall, "give seconds"))
    grace = as_number("--grace", arguments.grace, "give seconds")
    options = batch_options(arguments, security)
    with ExitStack() as stack:
        asked = stack.enter_context(_asked_to_stop())
        held = stack.enter_context(GraphServer(arguments.store, arguments.part, options))
        server = stack.enter_context(Server(held.service, arguments.listen, security, held.metrics, limits))
        metrics = None
        if arguments.metrics is not None:
            where, insecure = split_address(arguments.metrics), arguments.insecure
            endpoint = stack.enter_context(MetricsEndpoint(held.metrics, where, security, insecure=insecure))
            _warn(endpoint.warning)
            metrics = endpoint.address
        _say_ready(Ready(server.address, tuple(held.parts), metrics), arguments.store)
        held.warm_up()
        while not asked.wait(LOOK_UP):  # for as long as the server is to run
            pass
        print(f"stopping: {server.under_way} requests under way, new ones are refused", flush=True)
        finished = server.drain(grace)
        print("stopped" if finished else f"stopped after {grace:g} s, cutting off what was under way", flush=True)
    return _end(0 if finished else 1)


def _say_ready(ready: Ready, store: Path) -> None:
    """A sentence for people on stderr, and then a line for programs on stdout."""
    metrics = "" if ready.metrics is None else f", metrics on {ready.metrics}"
    parts = ",".join(map(str, ready.parts))
    print(f"{FOR_PEOPLE}{parts} of {store} on {ready.address}{metrics}", file=sys.stderr, flush=True)
    print(ready.line(), flush=True)


def _end(code: int) -> int:
    """Streams of idle clients hold up gRPC's threads, and with them the interpreter's end: end without it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def batch_options(arguments: Arguments, security: ServerSecurity) -> BatchOptions:
    """How whole batches are made, as the flags say it."""
    ca = read_ca(arguments.ca)
    peers = read_addresses(arguments.peers) if arguments.peers else []
    return BatchOptions(
        peers,
        towards_peers(security, ca) if peers else None,
        threads=as_int("--threads", arguments.threads, 1, "give a count of threads"),
        memory=parse_bytes("--memory", arguments.memory),
        cache=_cache(arguments),
        fanouts=fanouts_of("--fanouts", arguments.fanouts) or (),
        seeds=seeds_of(read_manifest(arguments.store).schema, arguments.seeds) if arguments.cache else None,
        timeout=as_number("--timeout", arguments.timeout, "give seconds"),
    )


def _cache(arguments: Arguments) -> str:
    """The size of the cache, refused where it is none or there is nothing to hold."""
    size = str(arguments.cache)
    if not size:
        return ""
    read_size(size)
    if not arguments.peers:
        raise ConfigError("--cache holds rows of other parts, and there are no --peers to ask for them; leave it out")
    parts = held_parts(arguments.store) if arguments.part is None else arguments.part
    if len(set(parts)) == len(read_manifest(arguments.store).parts):
        _warn("--cache has no effect: all parts are here")  # no error: one command may start all servers of a fleet
    return size


def _warn(warning: str | None) -> None:
    if warning is not None:
        print(f"hoploom: warning: {warning}", file=sys.stderr, flush=True)


@contextmanager
def _asked_to_stop() -> Iterator[threading.Event]:
    """Set by SIGTERM, and by Ctrl-C unless it is ignored; a second one ends at once."""
    asked = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            os._exit(128 + number)
        asked.set()

    before = take_over(stop)
    try:
        yield asked
    finally:
        put_back(before)


COMMANDS = {"serve": Command(_serve_arguments, _serve)}
