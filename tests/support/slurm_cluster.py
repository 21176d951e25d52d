"""A cluster of Slurm on this machine: its controller, three nodes and munge, started here and ended here.

A node is a slurmd with a loopback address for its name, so that each has an address that the others reach.
"""

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.ports import free_ports
from support.process_tree import daemon
from support.until import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue")
NUM_NODES = 3
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # where daemons are, also for those who are not root
START_DEADLINE = 30.0

CONFIG = """
ClusterName=hoploom
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1
KillWait=3
SlurmdParameters=config_overrides
NodeName=127.0.0.[1-{num_nodes}] NodeHostname={host} Port=[{ports[1]}-{ports[3]}] CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    environment: dict[str, str]

    def ask(self, *words: str) -> str:
        done = subprocess.run(
            words,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout + done.stderr


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Slurm]:
    """Start all daemons; skips where they are missing or do not start. None of them is left afterwards."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} of Slurm missing: scripts/services.sh installs them")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    (folder / "state").mkdir()
    host, user = socket.gethostname().split(".")[0], pwd.getpwuid(os.geteuid()).pw_name
    text = CONFIG.format(host=host, user=user, folder=folder, num_nodes=NUM_NODES, ports=free_ports(NUM_NODES + 1))
    (folder / "slurm.conf").write_text(text)
    slurm = Slurm(os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH})
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.sock", f"--key-file={folder}/munge.key"]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    with ExitStack() as stack:
        stack.enter_context(daemon(munged, slurm.environment, folder / "munged.out"))
        until_or_skip(lambda: (folder / "munge.sock").exists(), "the start of munged", folder)
        stack.enter_context(daemon(["slurmctld", "-D"], slurm.environment, folder / "slurmctld.out"))
        for number in range(1, NUM_NODES + 1):
            (folder / f"spool-127.0.0.{number}").mkdir()
            name = f"127.0.0.{number}"
            stack.enter_context(daemon(["slurmd", "-D", "-N", name], slurm.environment, folder / f"{name}.out"))
        idle = "\n".join(["idle"] * NUM_NODES)
        until_or_skip(
            lambda: slurm.ask("sinfo", "--noheader", "--Node", "--format=%T").strip() == idle,
            "the idleness of all nodes",
            folder,
        )
        stack.callback(end_all_jobs, slurm)
        yield slurm


def end_all_jobs(slurm: Slurm) -> None:
    """Before the daemons end: they are what ends a job's processes."""
    for job in slurm.ask("squeue", "--noheader", "--format=%i").split():
        slurm.ask("scancel", job)
    deadline = time.monotonic() + 30
    while slurm.ask("squeue", "--noheader", "--format=%i").split() and time.monotonic() < deadline:
        time.sleep(0.1)


def until_or_skip(reached: Callable[[], bool], what: str, folder: Path) -> None:
    """Skip with what the daemons say if it does not come."""
    try:
        until(reached, what, START_DEADLINE)
    except AssertionError as error:
        said = {path.name: path.read_text(errors="replace")[-500:] for path in folder.glob("*.[ol][ou][tg]")}
        pytest.skip(f"Slurm cannot be started here: {error}; {said}")
