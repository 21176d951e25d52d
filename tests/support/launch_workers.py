"""Programs that the tests of launching start, and a launcher of them: python launch_workers.py PLAN.json.

A program writes its process id into a file of its own, so that a test can see whether it is there, and then does what
its words say, one after the other.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Program:
    name: str

    def do(self, word: str) -> None:
        verb, _, argument = word.partition(":")
        getattr(self, verb)(argument)

    def print(self, text: str) -> None:
        print(text, flush=True)

    def complain(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def chatter(self, count: str) -> None:
        for i in range(int(count)):
            sys.stdout.write(f"<{self.name} {i} ")
            sys.stdout.flush()
            sys.stdout.write("x" * 300 + ">\n")

    def serve(self, address: str) -> None:
        self.print(json.dumps({"ready": address, "parts": [0]}))

    def exit(self, code: str) -> None:
        sys.exit(int(code))

    def die(self, name: str) -> None:
        os.kill(os.getpid(), getattr(signal, name))

    def ignore(self, name: str) -> None:
        signal.signal(getattr(signal, name), signal.SIG_IGN)

    def note(self, name: str) -> None:
        """Write a file when this signal comes, and end."""

        def write(number: int, frame: object) -> None:
            Path(f"{self.name}.{name}").write_text("")
            sys.exit(0)

        signal.signal(getattr(signal, name), write)

    def keep(self, variable: str) -> None:
        Path(f"{self.name}.variable").write_text(os.environ[variable])

    def leave(self, words: str) -> None:
        subprocess.Popen([sys.executable, __file__, f"{self.name}-left", *words.split("+")], start_new_session=True)
        _until(Path(f"{self.name}-left.pid"))

    def await_file(self, name: str) -> None:
        _until(Path(name))

    def sleep(self, seconds: str) -> None:
        deadline = time.monotonic() + float(seconds)
        while time.monotonic() < deadline:
            time.sleep(0.01)


def _until(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def launch(plan: dict[str, Any], folder: Path) -> int:
    """Run the programs of a plan: {"ssh": {...} or null, "programs": {label: [words]}, "environment": {...}}."""
    from hoploom.deploy.cluster_file import Host, Process, SshOptions
    from hoploom.deploy.guarded import Executor
    from hoploom.deploy.launch import Launch
    from hoploom.deploy.ssh import Ssh
    from hoploom.system import EndTimeouts

    python, working_folder = plan.get("python", sys.executable), plan.get("working_folder", str(folder))
    planned = []
    for label, words in plan["programs"].items():
        parts = tuple(plan.get("parts", {}).get(label, ()))
        host = Host("127.0.0.1", "127.0.0.1", "127.0.0.1", parts=parts, python=python)
        command = (sys.executable, "-S", str(Path(__file__)), label.replace("/", "-"), *words)
        planned.append(Process(label, host, command, plan["environment"], working_folder))
    executor = Executor() if plan["ssh"] is None else Ssh(SshOptions(config=plan["ssh"], connect_timeout=10))
    with Launch(planned, executor, EndTimeouts(0.5, 45.0, 10.0)) as launched:
        return launched.run()


def main() -> None:
    if sys.argv[1].endswith(".json"):
        plan = Path(sys.argv[1])
        sys.exit(launch(json.loads(plan.read_text()), plan.parent))
    name, *words = sys.argv[1:]
    part = Path(f"{name}.pid.part")
    part.write_text(str(os.getpid()))
    program = Program(name)
    quick = [word for word in words if word.partition(":")[0] in ("ignore", "note")]
    for word in quick:
        program.do(word)
    part.rename(f"{name}.pid")
    for word in words:
        if word not in quick:
            program.do(word)


if __name__ == "__main__":
    main()
