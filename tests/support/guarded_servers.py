"""Flight servers of every kind of security, in one process of their own, for test_serve_security.py.

Reads PEM texts from the folder given, the token from the file `token` in it; prints their ports as JSON, and ends with
its standard input.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from hoploom.serve.security import ServerSecurity, read_server_security
from hoploom.serve.token_auth import server_arguments

SCHEMA = pa.schema([("byte", pa.uint8())])


class Echo(flight.FlightServerBase):  # type: ignore[misc]
    """Gives back what it is sent."""

    def do_exchange(self, context: object, descriptor: object, reader: Any, writer: Any) -> None:
        writer.begin(SCHEMA)
        for chunk in reader:
            writer.write_metadata(chunk.app_metadata)

    def do_action(self, context: object, action: Any) -> Iterator[Any]:
        body = action.body.to_pybytes()
        if body == b"fail":
            raise ValueError("it was to\nfail")
        yield flight.Result(body)


def main(folder: Path) -> None:
    def pair(name: str) -> dict[str, Path]:
        return {"cert": folder / name / "server.pem", "key": folder / name / "server.key"}

    secured = {
        "free": ServerSecurity(),
        "token": read_server_security(token_file=folder / "token"),
        "tls": read_server_security(**pair("ours")),
        "mutual": read_server_security(**pair("ours"), client_ca=folder / "ours" / "ca.pem"),
        "all": read_server_security(folder / "token", **pair("ours"), client_ca=folder / "ours" / "ca.pem"),
        "elsewhere": read_server_security(**pair("elsewhere")),
    }
    servers = {name: Echo(**server_arguments(security, "127.0.0.1", 0)) for name, security in secured.items()}
    expired = [tuple((folder / "expired" / name).read_bytes() for name in ("server.pem", "server.key"))]
    servers["expired"] = Echo("grpc+tls://127.0.0.1:0", tls_certificates=expired)  # ours would refuse it
    print(json.dumps({name: server.port for name, server in servers.items()}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
