"""`hoploom launch` on Slurm's own daemons, in a folder of its own."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.slurm_cluster import Slurm, end_all_jobs

DEADLINE = 180
TOKEN = "a-token-nobody-guesses"
SRUN = 'srun = ["--comment=it\'s ours"]'
WAIT = 'options = ["--wait"]'  # sbatch then ends with the job, and with its exit code
OUTPUT = 'output = "it\'s said-%j.out"'  # with what means something to #SBATCH


@dataclass
class Launched:
    """`hoploom launch` in a folder of its own."""

    folder: Path
    slurm: Slurm
    number: str = ""  # of the last job

    def write(self, text: str, program: str, store: Path | None = None) -> None:
        (self.folder / "token").write_text(TOKEN)
        (self.folder / "token").chmod(0o600)
        (self.folder / "train.py").write_text(program)
        lines = ['executor = "slurm"', text]
        if store is not None:
            lines += [f'store = "{store}"', "[security]", 'token_file = "token"']
        (self.folder / "cluster.toml").write_text(
            "\n".join([*lines, "[slurm]", SRUN, WAIT, 'name = "test"', 'time = "5"', OUTPUT])
        )

    def run(self) -> tuple[int, str, str]:
        words = [sys.executable, "-m", "hoploom", "launch", "cluster.toml", "--", str(self.folder / "train.py")]
        given = {"cwd": self.folder, "env": self.slurm.environment, "capture_output": True, "text": True}
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, timeout=DEADLINE, check=False, **given)
        except subprocess.TimeoutExpired:
            end_all_jobs(self.slurm)  # or the next test's job waits for this one
            raise
        self.number = re.sub(r"\D", "", done.stdout)
        printed = "".join(path.read_text() for path in self.folder.glob(f"*said-{self.number}.out"))
        return done.returncode, printed, done.stderr

    def job(self) -> str:
        return self.slurm.ask("scontrol", "--oneliner", "show", "job", self.number)
