"""That a graph server is ready, as one line of JSON on its standard output: for programs that start servers.

>>> Ready("127.0.0.1:7700", (0, 1)).line()
'{"ready": "127.0.0.1:7700", "parts": [0, 1]}'
"""

import json
from dataclasses import dataclass

FOR_PEOPLE = "serving parts "  # how the sentence on stderr begins that says the same


@dataclass(frozen=True)
class Ready:
    """Where a server listens, which parts it serves, and where its metrics are."""

    address: str  # HOST:PORT
    parts: tuple[int, ...]
    metrics: str | None = None  # HOST:PORT

    def line(self) -> str:
        """Its line, without the line's end. It begins with {"ready": so that a shell script finds it too."""
        metrics = {} if self.metrics is None else {"metrics": self.metrics}
        return json.dumps({"ready": self.address, "parts": self.parts, **metrics})

    @staticmethod
    def read(line: str) -> "Ready | None":
        """What a server's line says; None for any other line."""
        try:
            found = json.loads(line)
            address, parts, metrics = found["ready"], tuple(found["parts"]), found.get("metrics")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        fits = isinstance(address, str) and isinstance(metrics, str | None) and all(type(part) is int for part in parts)
        return Ready(address, parts, metrics) if fits else None
