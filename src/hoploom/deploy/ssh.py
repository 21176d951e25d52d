"""Start processes on other hosts by the system's ssh, with the user's own configuration, keys and known hosts.

No secret is on a command line: the job is sent over stdin. ssh never asks for input: a key with a passphrase must be in
an agent, and the host key must be known.
"""

import re
import shlex
from collections.abc import Sequence

from hoploom.deploy.cluster_file import Process, SshOptions
from hoploom.deploy.guarded import BOOT, LOST_CONNECTION, Executor, Failure, by_hand, ending

SILENCE = 120.0  # seconds without a heartbeat after which a guard considers the connection lost
STARTING = 60.0  # seconds for a remote shell and Python to start
NOT_FOUND, NOT_RUNNABLE = 127, 126  # exit codes of shells
FORGET = re.compile(r"ssh-keygen .*-R .*")
OPTIONS = {
    "BatchMode": "yes",  # never ask for input
    "ServerAliveInterval": "15",
    "ServerAliveCountMax": "4",
    "ControlMaster": "no",  # one connection per process: a shared one ends with the process that opened it
    "ControlPath": "none",
    "ClearAllForwardings": "yes",
    "RemoteCommand": "none",
    "EscapeChar": "none",
}
REASONS = (  # a message of ssh -> what is wrong, and the hint
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "has another host key than the known one",
        "if it was set up anew, forget the old key with {forget}; else somebody may sit in between",
    ),
    (
        r"Host key verification failed|host key is known",
        "has a host key that is not known yet",
        "log in once with {login}, and compare the fingerprint",
    ),
    (
        r"Permission denied|Too many authentication failures",
        "accepts none of your keys",
        "add one to its authorized_keys (ssh-copy-id), or to your agent; {login} must work without a password",
    ),
    (
        r"Could not resolve hostname",
        "has a name that cannot be resolved",
        "correct its address or ssh, or add it to your ssh configuration",
    ),
    (
        r"Connection (refused|closed|reset)|timed out|No route to host|Network is unreachable|banner exchange",
        "cannot be reached",
        "see whether it is up, and whether {login} works",
    ),
)


class Ssh(Executor):
    """Starts guarded processes on other hosts, by ssh."""

    silence = SILENCE

    def __init__(self, options: SshOptions) -> None:
        self.options = options
        self.begin_deadline = options.connect_timeout + STARTING

    def arguments(self, process: Process) -> list[str]:
        """Return the ssh command, as a list of words, that starts the guard on the other host."""
        settings = {"ConnectTimeout": str(self.options.connect_timeout), **OPTIONS}
        words = ["ssh", "-T", *[word for name, value in settings.items() for word in ("-o", f"{name}={value}")]]
        return [*words, *self._destination(process), f"exec {shlex.join([process.host.python, *BOOT])}"]

    def shown(self, process: Process) -> str:
        return shlex.join(["ssh", *self._destination(process), by_hand(process)])

    def refusal(self, process: Process, code: int, tail: Sequence[str]) -> Failure:
        said = "\n".join(tail)
        host = process.host
        if code in (NOT_FOUND, NOT_RUNNABLE):
            message = (
                f"python is {host.python}, which {host.ssh} cannot run; give the path of one with hoploom installed"
            )
            return Failure(process.label, message, tuple(tail), 2)
        if code == LOST_CONNECTION:
            for pattern, what, way_out in REASONS:
                if re.search(pattern, said):
                    known = FORGET.search(said)  # ssh names the file and the host
                    forget = known[0] if known else f"ssh-keygen -R {shlex.quote(host.ssh.rpartition('@')[2])}"
                    login = shlex.join(["ssh", *(word for word in self._destination(process) if word != "--"), "true"])
                    hint = way_out.format(login=f"`{login}`", forget=f"`{forget}`")
                    message = f"{self._named(process)} {what}; {hint}"
                    return Failure(process.label, message, tuple(tail), 1)
        return Failure(process.label, f"ssh to {self._named(process)} {ending(code)}", tuple(tail), 1)

    def _destination(self, process: Process) -> list[str]:
        host = process.host
        config = [] if self.options.config is None else ["-F", self.options.config]
        config += [] if self.options.identity is None else ["-i", self.options.identity, "-o", "IdentitiesOnly=yes"]
        return [*config, *([] if host.ssh_port is None else ["-p", str(host.ssh_port)]), "--", host.ssh]

    def _named(self, process: Process) -> str:
        port = process.host.ssh_port
        return process.host.ssh if port is None else f"{process.host.ssh} (port {port})"
