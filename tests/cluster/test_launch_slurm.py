"""The Slurm executor: the batch script by itself, and against Slurm's own daemons on this machine."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.process_tree import processes_in
from support.slurm_cluster import Slurm, end_all_jobs

from hoploom.deploy.cluster_file import Cluster, Host, Security, ServerOptions, SlurmOptions
from hoploom.deploy.slurm import NAME, _quoted, script
from hoploom.errors import ConfigError

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


# An epoch over the ring, wherever it is: the feature row of node v is v, and its picks are v + 1 and v + 2.
TRAIN = """
import hoploom, sys, torch
with hoploom.init(device="cpu") as context:
    store = hoploom.open(context=context)
    loader = hoploom.NeighborLoader(
        store, [2], input_nodes="train", batch_size=2, rank=context.rank, world_size=context.world_size
    )
    seeds = []
    for batch in loader:
        assert torch.equal(batch.x[:, 0].long(), batch.n_id), batch
        assert sorted(set(batch.n_id.tolist())) == sorted(
            {(int(v) + d) % 12 for v in batch.n_id[: batch.batch_size] for d in (0, 1, 2)}
        )
        seeds += batch.n_id[: batch.batch_size].tolist()
    print(f"rank {context.rank} of {context.world_size} had {seeds}, elsewhere: {store.deployment.makes_batches}")
"""
FAIL = """
import os, sys, time
if os.environ["RANK"] == "1":
    raise ValueError("loss is nan")
time.sleep(600)
"""
PYTHON = """#!/bin/bash
[ "$3" != serve ] && exec echo "parts $HOPLOOM_PARTS"
trap 'echo stopped; exit' TERM
echo '{"ready": "there:7"}'
while :; do sleep 0.05; done
"""
STAY = """
import time
print("training", flush=True)
time.sleep(600)
"""


def cluster_of(*hosts: Host, **changed: object) -> Cluster:
    cluster = Cluster(hosts, "/stores/graph", "slurm", "server-client", "host0:29500", server=ServerOptions(port=7700))
    return replace(cluster, **changed)  # type: ignore[arg-type]


def host(number: int, **changed: object) -> Host:
    plain = Host(f"host{number}", "", "", processes=1, port=7700, parts=(), python="python3", folder="/work")
    return replace(plain, **changed)  # type: ignore[arg-type]


SERVERS = (host(0, processes=0, serves=True, parts=(0,)), host(1, processes=0, serves=True, parts=(1,)))


def test_the_script_is_bash_and_starts_each_server_and_torchrun_on_its_node() -> None:
    written = script(cluster_of(*SERVERS, host(2, processes=2), host(3, processes=4)), ["train", "run.toml"])
    subprocess.run(["bash", "-n"], input=written, text=True, check=True, timeout=10)
    lines = written.splitlines()
    assert "#SBATCH --nodes=4" in lines
    servers = [line for line in lines if line.startswith("serve ")]
    assert [line.split()[1] for line in servers] == ["0", "1"]
    assert '--part 1 --listen "${hosts[1]}":7700 --peers "${hosts[0]}":7700' in servers[1]
    assert 'export HOPLOOM_SERVERS="${hosts[0]}":7700,"${hosts[1]}":7700' in lines
    first, second = (line for line in lines if "torch.distributed.run" in line)
    assert first.startswith("0) ")
    assert "--node-rank 0 --nproc-per-node 2" in first
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 4" in second
    assert second.endswith("-m hoploom train run.toml ;;")
    assert '--nodes=2 --ntasks=2 --nodelist="${hosts[2]},${hosts[3]}"' in written


def test_worker_mode_tells_each_node_its_parts() -> None:
    hosts = (host(0, serves=True, parts=(0,)), host(1, serves=True, parts=(1, 2), devices=(0, 3)))
    written = script(cluster_of(*hosts, mode="worker"), ["script.py"])
    first, second = (line for line in written.splitlines() if "torch.distributed.run" in line)
    assert "export HOPLOOM_PARTS=0;" in first
    assert "HOPLOOM_PARTS=1,2" in second
    assert "CUDA_VISIBLE_DEVICES=0,3" in second
    assert "export HOPLOOM_STORE=/stores/graph" in written


@pytest.mark.parametrize("word", ["plain", 'it\'s "$HOME" `id` $(id) \\ * ~', "", "a\nb", "${hosts[0]} ${port}"])
def test_a_word_reaches_the_program_as_it_is_but_for_the_nodes_names(word: str) -> None:
    node = NAME.format("hosts[1]")
    bash = f"hosts=(n1 n2); server_port=7; printf '%s\\n' {_quoted(word)} {_quoted(f'{word}{node}:0,{node}:01{word}')}"
    said = subprocess.run(["bash", "-c", bash], capture_output=True, text=True, check=True, timeout=10).stdout
    assert said == f"{word}\n{word}n2:7,n2:01{word}\n"


STUBS = {  # what the script calls, and a program that says what it was told
    "scontrol": "printf '%s\\n' n0 n1",
    "scancel": ": >stop",
    "srun": """
        printf '%s\\n' "$@" >>argv
        while [[ $1 == --* ]]; do shift; done
        [ "$1" != sh ] && exec "$@"
        SLURM_PROCID=0 "$@" && SLURM_PROCID=1 exec "$@"
    """,
    "python": """
        printf '%s ' "$@" >>argv
        echo "$3 $API_KEY $OWN ${trainer-}" >>told
        [ "$3" != serve ] && exit
        echo '{"ready": "127.0.0.1:7700", "parts": [0]}'
        until [ -e stop ]; do sleep 0.05; done
    """,
}


def test_users_variables_reach_programs_and_no_command_line(tmp_path: Path) -> None:
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / name).chmod(0o755)
    hosts = tuple(
        host(
            number,
            serves=True,
            port=0,
            parts=(number,),
            python=str(tmp_path / "python"),
            folder=str(tmp_path),
            environment={"API_KEY": "top $ecret", "OWN": f"secret{number}"},
        )
        for number in (0, 1)
    )
    written = script(cluster_of(*hosts, mode="worker", rendezvous="host0:0"), ["train", "run.toml"])
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "20007", "SLURM_JOB_NODELIST": "n[0-1]"}
    done = subprocess.run(
        ["bash"], input=written, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [f"{program} top $ecret secret{number} " for program in ("serve", "--nnodes") for number in (0, 1)]
    assert sorted((tmp_path / "told").read_text().splitlines()) == sorted(told)
    argv = (tmp_path / "argv").read_text()
    assert "ecret" not in argv
    assert "--listen n1:10007 --peers n0:10007 " in argv  # 10000 + 20007 % 5000
    assert "--master-addr n0 --master-port 20007 " in argv  # 15000 + 20007 % 15000


def test_options_of_sbatch_and_srun_are_passed_on() -> None:
    options = SlurmOptions(
        partition="gpu",
        time="12:00:00",
        gpus=4,
        cpus=32,
        memory="200G",
        output="it's out/%j.txt",
        setup=("module load cuda",),
        options=("--mail-type=END", "--exclusive"),
        srun=("--container-image=nvcr.io#nvidia/pytorch:25.01-py3", "--exclusive", "--comment=it's mine"),
    )
    lines = script(cluster_of(*SERVERS, host(2), slurm=options), ["train", "run.toml"]).splitlines()
    asked = ["--partition=gpu", "--time=12:00:00", "--gpus-per-node=4", "--cpus-per-task=32", "--mem=200G"]
    for option in [*asked, "--exclusive", "--mail-type=END", '--output="it\'s out/%j.txt"']:
        assert f"#SBATCH {option}" in lines
    assert "module load cuda" in lines
    (step,) = (line for line in lines if line.startswith("step="))
    assert "'--container-image=nvcr.io#nvidia/pytorch:25.01-py3'" in step
    assert step.endswith(""" --exclusive '--comment=it'"'"'s mine')""")  # after ours: the last word counts
    assert not any("cd /work" in line or "--chdir" in line for line in lines)


def test_no_secret_is_in_the_script_but_the_path_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    written = script(cluster_of(*SERVERS, host(2), security=Security(str(tmp_path / "token"))), ["train", "run.toml"])
    assert f"--token-file {tmp_path}/token" in written
    assert f"export HOPLOOM_TOKEN_FILE={tmp_path}/token" in written
    assert TOKEN not in written


def test_an_option_that_sbatch_would_not_read_as_one_is_refused() -> None:
    for name in ("options", "srun"):
        options = SlurmOptions(**{name: ("rm -rf",)})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=rf"slurm\.{name} has 'rm -rf'; write each as Slurm does: --name=value"):
            script(cluster_of(host(0), mode="none", slurm=options), ["train", "run.toml"])


def test_without_sbatch_the_way_out_is_said(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text('hosts = 1\nexecutor = "slurm"\n')
    words = [sys.executable, "-m", "hoploom", "launch", "cluster.toml", "--", "train", "run.toml"]
    done = subprocess.run(
        words, cwd=tmp_path, env=os.environ | {"PATH": ""}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("hoploom: there is no sbatch on this host; launch from a host that submits to Slurm")


@pytest.fixture
def launched(slurm: Slurm, tmp_path: Path) -> Launched:
    return Launched(tmp_path, slurm)


def lines_with(word: str, said: str) -> list[str]:
    return sorted(line for line in said.splitlines() if word in line)


def seeds_in(lines: Sequence[str]) -> list[int]:
    return sorted(int(seed) for line in lines for seed in line.partition("[")[2].partition("]")[0].split(","))


def test_servers_start_before_trainers_and_end_after_them(launched: Launched) -> None:
    python = launched.folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    launched.write(f'hosts = 2\nmode = "worker"\npython = "{python}"', "", launched.folder / "a.store")
    code, said, errors = launched.run()
    assert code == 0, said + errors
    assert "hoploom: the job prints to it's said-%j.out; `squeue --me` shows its state" in errors
    ready, trained, stopped = lines_with("ready", said), lines_with("parts", said), lines_with("stopped", said)
    hosts = ["127.0.0.1", "127.0.0.2"]
    assert ready == [f'{host}/server | {{"ready": "there:7"}}' for host in hosts]
    assert trained == [f"{host}/trainers | parts {part}" for part, host in enumerate(hosts)]
    assert stopped == [f"{host}/server | stopped" for host in hosts]
    order = [line for line in said.splitlines() if line in (*ready, *trained, *stopped)]
    assert [sorted(order[i : i + 2]) for i in (0, 2, 4)] == [ready, trained, stopped]
    assert "JobState=COMPLETED" in launched.job()
    assert not processes_in(launched.folder)


@pytest.mark.slow
def test_servers_on_one_node_make_batches_for_trainers_on_others(launched: Launched, sound_stores: Path) -> None:
    launched.write('hosts = 3\nservers = 1\nprocesses = 2\nmode = "server-client"', TRAIN, sound_stores / "ring")
    code, said, errors = launched.run()
    assert code == 0, said + errors
    had = lines_with("elsewhere: True", said)
    assert (len(had), {line.partition("/")[0] for line in had}) == (4, {"127.0.0.2", "127.0.0.3"})
    assert seeds_in(had) == [0, 1, 2, 3, 4, 5]
    assert not processes_in(launched.folder)


@pytest.mark.slow
def test_a_trainer_that_fails_ends_the_job(launched: Launched, sound_stores: Path) -> None:
    launched.write('hosts = 2\nmode = "worker"', FAIL, sound_stores / "ring")
    code, said, errors = launched.run()
    assert code == 1, said + errors
    assert "127.0.0.2/trainers | ValueError: loss is nan" in said
    assert "JobState=FAILED" in launched.job()
    assert "ExitCode=1:0" in launched.job()
    assert not processes_in(launched.folder)


@pytest.mark.slow
def test_a_server_that_cannot_serve_fails_the_job(launched: Launched, tmp_path: Path) -> None:
    launched.write('hosts = 2\nmode = "worker"', STAY, tmp_path / "absent.store")
    code, said, errors = launched.run()
    assert code == 1, said + errors
    assert "training" not in said
    assert "/server | hoploom: " in said
    assert "absent.store" in said
    assert not processes_in(launched.folder)


def test_what_sbatch_refuses_is_said_in_its_words(launched: Launched) -> None:
    launched.write("hosts = 1", STAY)
    with (launched.folder / "cluster.toml").open("a") as file:
        file.write('\npartition = "nowhere"\n')
    code, _, errors = launched.run()
    assert code == 1
    assert "invalid partition" in errors
    assert "hoploom: sbatch ended with exit status 1; its own lines say why, and [slurm] of the cluster" in errors
