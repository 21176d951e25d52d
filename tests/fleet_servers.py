"""Graph servers of any number of stores in one process, for test_serve.py: to import takes longer than to serve.

Reads a store and the parts of each of its servers as a line of JSON, answers with their addresses, and reads on.
"""

import json
import sys
from contextlib import ExitStack

from hoploom.serve.node import Making, Node
from hoploom.serve.security import ServerSecurity
from hoploom.serve.server import Server


def main() -> None:
    with ExitStack() as stack:
        for line in sys.stdin:
            path, fleet = json.loads(line)
            addresses = []
            for parts in fleet:
                node = stack.enter_context(Node(path, parts, Making()))
                server = Server(node.service, "127.0.0.1:0", ServerSecurity(), node.metrics)
                addresses.append(stack.enter_context(server).address)
            print(json.dumps(addresses), flush=True)


if __name__ == "__main__":
    main()
