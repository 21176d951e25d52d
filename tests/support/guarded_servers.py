"""Servers of every kind of security, in one process of their own, for test_serve_security.py.

Reads PEM texts from the folder given, the token from the file `token` in it; prints their addresses as JSON, and ends
with its standard input.
"""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hoploom.serve.memory_budget import RequestContext
from hoploom.serve.metrics import Metrics
from hoploom.serve.security import ServerSecurity, read_server_security
from hoploom.serve.server import Server, ServerLimits
from hoploom.serve.wire import Message


class Echo:
    def answer(self, request: Message, call: RequestContext) -> Message:
        if request.header["ask"] == "fail":
            raise ValueError("it was to\n\x1b[2Jfail" + "x" * 100_000)
        return Message({}, request.tensors)


def main(folder: Path) -> None:
    def pair(name: str) -> dict[str, Path]:
        return {"cert": folder / name / "server.pem", "key": folder / name / "server.key"}

    expired = read_server_security(**pair("ours"))
    for field, name in (("certificate", "server.pem"), ("key", "server.key")):  # who read it would be told
        object.__setattr__(expired, field, (folder / "expired" / name).read_bytes())
    secured = {
        "free": ServerSecurity(),
        "token": read_server_security(token_file=folder / "token"),
        "tls": read_server_security(**pair("ours")),
        "mutual": read_server_security(**pair("ours"), client_ca=folder / "ours" / "ca.pem"),
        "all": read_server_security(folder / "token", **pair("ours"), client_ca=folder / "ours" / "ca.pem"),
        "elsewhere": read_server_security(**pair("elsewhere")),
        "expired": expired,
    }
    echo: Any = Echo()
    with ExitStack() as stack:
        found = {}
        for name, security in secured.items():
            server = Server(echo, "127.0.0.1:0", security, Metrics(), ServerLimits())
            found[name] = stack.enter_context(server).address
        print(json.dumps(found), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
