"""`hoploom launch` on Slurm's own daemons, in a folder of its own."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.slurm_cluster import Slurm

DEADLINE = 90
TOKEN = "a-token-nobody-guesses"
SRUN = 'srun = ["--comment=it\'s ours"]'
OUTPUT = 'output = "it\'s said-%j.out"'  # with what means something to #SBATCH


@dataclass
class Launched:
    """`hoploom launch` in a folder of its own."""

    folder: Path
    slurm: Slurm

    def write(self, text: str, program: str, store: Path | None = None) -> None:
        (self.folder / "token").write_text(TOKEN)
        (self.folder / "token").chmod(0o600)
        (self.folder / "train.py").write_text(program)
        lines = ['executor = "slurm"', text]
        if store is not None:
            lines += [f'store = "{store}"', "[security]", 'token_file = "token"']
        (self.folder / "cluster.toml").write_text(
            "\n".join([*lines, "[slurm]", SRUN, 'name = "test"', 'time = "5"', OUTPUT])
        )

    def start(self) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "hoploom", "launch", "cluster.toml", "--", str(self.folder / "train.py")]
        return subprocess.Popen(
            words,
            cwd=self.folder,
            env=self.slurm.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def run(self) -> tuple[int, str, str]:
        process = self.start()
        try:
            said, errors = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
        return process.returncode, said, errors

    def job(self, errors: str) -> str:
        """What Slurm says of the job."""
        number = errors.partition("submitted job ")[2].partition(";")[0]
        return self.slurm.ask("scontrol", "--oneliner", "show", "job", number)

    def processes(self) -> list[str]:
        """Those whose command names this folder; all that the job starts do."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if any(str(self.folder).encode() in word for word in words):
                found.append(b" ".join(words).decode())
        return found
