"""Graph servers of any number of stores in one process: to import takes longer than to serve.

Reads a store, the parts of each of its servers and, where they are to make whole batches, the address of each as a line
of JSON, answers with their addresses, and reads on.
"""

import json
import sys
from contextlib import ExitStack

from hoploom.serve.graph_server import BatchOptions, GraphServer
from hoploom.serve.security import ServerSecurity
from hoploom.serve.server import Server


def main() -> None:
    with ExitStack() as stack:
        for line in sys.stdin:
            path, fleet, peers = json.loads(line)
            addresses = []
            for parts, listen in zip(fleet, peers or ["127.0.0.1:0"] * len(fleet), strict=True):
                held = stack.enter_context(GraphServer(path, parts, BatchOptions(peers=tuple(peers))))
                server = Server(held.service, listen, ServerSecurity(), held.metrics)
                addresses.append(stack.enter_context(server).address)
            print(json.dumps(addresses), flush=True)


if __name__ == "__main__":
    main()
