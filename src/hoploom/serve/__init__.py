"""The graph server and its clients, which exchange messages over sockets. `docs/protocol.md` describes the messages."""

import json
from dataclasses import dataclass

SERVING = "serving parts "  # the beginning of the line that a server prints on stderr, for people


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
        """Return the JSON text without a newline. It begins with {"ready": so that shell scripts can find the line."""
        metrics = {} if self.metrics is None else {"metrics": self.metrics}
        return json.dumps({"ready": self.address, "parts": self.parts, **metrics})

    @staticmethod
    def read(line: str) -> "Ready | None":
        """Parse the line that a ready server prints; return None for any other line."""
        try:
            found = json.loads(line)
            address, parts, metrics = found["ready"], tuple(found["parts"]), found.get("metrics")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        fits = isinstance(address, str) and isinstance(metrics, str | None) and all(type(part) is int for part in parts)
        return Ready(address, parts, metrics) if fits else None
