"""The graph server and its clients, which exchange messages over sockets. `docs/protocol.md` describes them."""

import json
from dataclasses import dataclass

SERVING = "serving parts "  # the beginning of the line for people, on stderr


@dataclass(frozen=True)
class Ready:
    """The line of JSON that a graph server prints when it is ready, for programs that start servers.

    >>> Ready("127.0.0.1:7700", (0, 1)).line()
    '{"ready": "127.0.0.1:7700", "parts": [0, 1]}'
    """

    address: str  # HOST:PORT
    parts: tuple[int, ...]
    metrics: str | None = None  # HOST:PORT

    def line(self) -> str:
        """The line, without a newline. It begins with {"ready": so that shell scripts find it."""
        metrics = {} if self.metrics is None else {"metrics": self.metrics}
        return json.dumps({"ready": self.address, "parts": self.parts, **metrics})

    @staticmethod
    def read(line: str) -> "Ready | None":
        """Read the line of a server; None for any other line."""
        try:
            found = json.loads(line)
            address, parts, metrics = found["ready"], tuple(found["parts"]), found.get("metrics")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        fits = isinstance(address, str) and isinstance(metrics, str | None) and all(type(part) is int for part in parts)
        return Ready(address, parts, metrics) if fits else None
