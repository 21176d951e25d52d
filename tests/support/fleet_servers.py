"""Graph servers of any number of stores in one process: to import takes longer than to serve.

Reads a line of JSON for each fleet: a store, the parts of each of its servers, the address of each where they are to
make whole batches, the memory of each, and how much of the store each holds. Answers with their addresses and with the
modules of ours that it has loaded, and reads on.
"""

import json
import sys
from contextlib import ExitStack

import hoploom.cli.serving  # noqa: F401  # for who asks what a server loads
from hoploom.serve.graph_server import BatchOptions, GraphServer
from hoploom.serve.security import ServerSecurity
from hoploom.serve.server import Server


def main() -> None:
    with ExitStack() as stack:
        for line in sys.stdin:
            path, fleet, peers, memory, store_memory = json.loads(line)
            addresses = []
            for parts, listen in zip(fleet, peers or ["127.0.0.1:0"] * len(fleet), strict=True):
                options = BatchOptions(peers=tuple(peers), memory=memory, store_memory=store_memory)
                held = stack.enter_context(GraphServer(path, parts or None, options))
                server = Server(held.service, listen, ServerSecurity(), held.metrics)
                addresses.append(stack.enter_context(server).address)
            loaded = sorted(name for name in sys.modules if name.split(".")[0] == "hoploom")
            print(json.dumps([addresses, loaded]), flush=True)


if __name__ == "__main__":
    main()
