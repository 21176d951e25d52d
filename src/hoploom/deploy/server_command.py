"""The command line of a graph server: all that start `hoploom serve` write it here."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hoploom.deploy.cluster_file import Security, ServerOptions


@dataclass(frozen=True)
class ServerCommand:
    """What one server is told."""

    store: str
    parts: Sequence[int]  # (): all that the folder holds
    listen: str  # HOST:PORT
    peers: Sequence[str] = ()  # servers of the other parts
    security: Security = field(default_factory=Security)
    options: ServerOptions = field(default_factory=ServerOptions)
    metrics: str | None = None  # HOST:PORT
    grace: int | None = None  # seconds for requests under way at a stop

    def words(self, python: str) -> tuple[str, ...]:
        """The program and its arguments.

        >>> ServerCommand("graph.store", [0], "127.0.0.1:7700").words("python3")[1:4]
        ('-m', 'hoploom', 'serve')
        """
        security, options = self.security, self.options
        given = {
            "--peers": ",".join(self.peers) or None,
            "--token-file": security.token_file,
            "--cert": security.cert,
            "--key": security.private_key,
            "--ca": security.ca,
            "--client-ca": security.ca if security.mutual else None,
            "--threads": options.threads,
            "--memory": options.memory,
            "--cache": options.cache,
            "--fanouts": None if options.fanouts is None else ",".join(map(str, options.fanouts)),
            "--seeds": options.seeds,
            "--metrics": self.metrics,
        }
        parts = [word for part in self.parts for word in ("--part", str(part))]
        flags = [word for flag, value in given.items() if value is not None for word in (flag, str(value))]
        last = ["--insecure"] if security.insecure else []
        last += [] if self.grace is None else ["--grace", str(self.grace)]
        return (python, "-m", "hoploom", "serve", self.store, *parts, "--listen", self.listen, *flags, *last)
