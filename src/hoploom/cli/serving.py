"""Run `hoploom serve`: serve parts of a store to other processes until a signal comes."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType

from hoploom.cli import Arguments, fanouts_or_none, seeds_of
from hoploom.config.values import parse_bytes, read_addresses, split_address
from hoploom.errors import ConfigError
from hoploom.ranks import environment
from hoploom.serve import SERVING, Ready
from hoploom.serve.security import ServerSecurity, check_listen, read_ca, read_server_security, towards_peers
from hoploom.store import Store
from hoploom.store.format import read_manifest
from hoploom.store.row_cache import read_size
from hoploom.store.store import held_parts
from hoploom.system import needs, put_back, take_over

with needs("cluster"):
    from hoploom.serve.graph_server import BatchOptions, GraphServer
    from hoploom.serve.metrics import MetricsEndpoint
    from hoploom.serve.server import LOOK_UP, Server, ServerLimits


def serve(arguments: Arguments) -> int:
    """Serve until SIGTERM or Ctrl-C, then finish the requests in flight."""
    files = arguments.token_file, arguments.cert, arguments.key, arguments.client_ca
    security = read_server_security(*files, token=environment.run_token())
    host, _ = split_address(arguments.listen)
    warning = check_listen(host, security, insecure=arguments.insecure)
    if not environment.is_quiet():  # else the ranks that started this server warn, and name their options
        _warn(warning)
    grace: float = arguments.grace
    options = batch_options(arguments, security)
    with ExitStack() as stack:
        asked = stack.enter_context(_asked_to_stop())
        held = stack.enter_context(GraphServer(arguments.store, arguments.part, options))
        limits = ServerLimits(arguments.stall, shared=options.memory // 2, memory=held.service.budget)
        server = stack.enter_context(Server(held.service, arguments.listen, security, held.metrics, limits))
        metrics = None
        if arguments.metrics is not None:
            where, insecure = split_address(arguments.metrics), arguments.insecure
            endpoint = stack.enter_context(MetricsEndpoint(held.metrics, where, security, insecure=insecure))
            _warn(endpoint.warning)
            metrics = endpoint.address
        ready, budget = Ready(server.address, tuple(held.parts), metrics), held.store.budget
        shown = f"{','.join(map(str, ready.parts))} of {held.store.path} on {ready.address}"
        shown += "" if metrics is None else f", metrics on {metrics}"
        shown += "" if budget is None else f"; {budget}"
        shown += "" if held.store.placed is None else f"; {held.store.placed!r}"
        print(f"{SERVING}{shown}", file=sys.stderr, flush=True)
        print(ready.line(), flush=True)  # for programs
        held.warm_up()
        while not asked.wait(LOOK_UP):
            pass
        print(f"stopping: {held.metrics.in_flight} requests under way, new ones are refused", flush=True)
        finished = server.drain(grace)
        print("stopped" if finished else f"stopped after {grace:g} s, cutting off what was under way", flush=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if finished else 1)  # the interpreter's end would disturb threads that were cut off in the core


def batch_options(arguments: Arguments, security: ServerSecurity) -> BatchOptions:
    """Return the options of the batches that the server makes, from the command line."""
    ca, given = read_ca(arguments.ca), arguments.store_memory
    peers = read_addresses(arguments.peers) if arguments.peers else []
    return BatchOptions(
        peers,
        towards_peers(security, ca) if peers else None,
        threads=arguments.threads,
        memory=parse_bytes("--memory", arguments.memory),
        cache=_cache(arguments),
        fanouts=fanouts_or_none("--fanouts", arguments.fanouts) or (),
        seeds=seeds_of(read_manifest(arguments.store).schema, arguments.seeds) if arguments.cache else None,
        timeout=arguments.timeout,
        store_memory=None if given is None else parse_bytes("--store-memory", given),
        place=None if arguments.device is None else partial(placed_for_clients, arguments.device),
    )


def placed_for_clients(device: str, store: Store) -> Store:
    """Return the store with as much of it as fits on a GPU, which then answers the clients."""
    from hoploom.gpu.placement import place

    own = replace(store, shards=store.parts, topology=store.parts)  # clients ask for nothing of other parts
    placed = replace(place(own, "auto", "auto", device=device), shards=store.shards, topology=store.topology)
    from hoploom.deploy.device_server import answer_on_device  # imports Triton, which is installed: `place` has looked

    return answer_on_device(placed)


def _cache(arguments: Arguments) -> str:
    """Return the text of --cache; "" for no cache. Raise ConfigError if it is not a size, or if --peers is missing."""
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
    """Yield an event that SIGTERM sets, and SIGINT unless it is ignored. A second signal ends the process."""
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
