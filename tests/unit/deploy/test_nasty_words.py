"""Whatever is in words, values, folders and names: shells, Slurm and Kubernetes hand programs just that."""

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.run import parse_args as torchrun_words

from hoploom.cli import main
from hoploom.deploy import kubernetes, slurm
from hoploom.deploy.cluster_file import Cluster, Host, KubernetesOptions, Process, SshOptions
from hoploom.deploy.guarded import BOOT, by_hand
from hoploom.deploy.programs import processes
from hoploom.deploy.resolve import read_cluster
from hoploom.deploy.ssh import Ssh
from hoploom.errors import ConfigError

# Shows what it was given: the value of a variable, its folder and its words.
SHOW = """#!/bin/sh
printf '%s\\0' "$NASTY" "$PWD" "$@" >"$SHOWN"
"""
SRUN = """#!/bin/sh
while case $1 in -*) ;; *) false ;; esac; do shift; done
SLURM_PROCID=0 exec "$@"
"""
PIECES = (
    *("\nTRAINER\n", "TRAINER", "\n", "\r", "\t", " ", "'", '"', "\\", "$", "$(touch hacked)", "`touch hacked`", "$$"),
    *("$(NASTY)", "${NASTY}", "; touch hacked", "#", "!", "*", "?", "~", "-", "=", "%", "&", "|", "<", ">", "{", "}"),
    *("\x1b[31m", "\x7f", "\u2028", "ü", "x", "0", "EOF", "esac", ";;", "%j", "---\n", ": ", "\x85"),
)
nasty = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
every_shell = settings(max_examples=12)


def ours(folder: Path, words: Sequence[str], value: str, executor: str) -> Cluster:
    """A cluster of one host, whose folder and Python have such names, too."""
    inside = folder / "it's $HOME \\ `x`"
    inside.mkdir(exist_ok=True)
    for path, text in ((inside / "python", SHOW), (folder / "srun", SRUN), (folder / "scontrol", "#!/bin/sh\necho me")):
        path.write_text(text)
        path.chmod(0o755)
    environment = {"NASTY": value, "SHOWN": str(folder / "shown")}
    python, options = str(inside / "python"), KubernetesOptions(image="i", claim="c", mount=str(folder))
    host = Host("me", "", "me", None, 1, None, False, 7700, (0,), python, str(inside), environment)
    file = f"my\n{words[-1]}.toml"
    hosts, store = (host,), f"{folder}/it's a $store"
    return Cluster(hosts, store, executor, "none", "me:29500", kubernetes=options, file=file)  # type: ignore[arg-type]


def shown(folder: Path) -> list[str]:
    """What the program was given, and that nothing else was run."""
    assert not list(folder.rglob("hacked"))
    return (folder / "shown").read_bytes().decode().split("\0")[:-1]


def run(command: Sequence[str], folder: Path, **variables: str) -> None:
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr


def trainer(cluster: Cluster, words: Sequence[str]) -> Process:
    return processes(cluster, ["train.py", *words])[-1]


@every_shell
@given(st.lists(nasty, min_size=1, max_size=4), nasty)
@example(["a\nTRAINER\ntouch hacked\n"], "b\nTRAINER\ntouch hacked\nTRAINER_")
def test_a_slurm_script_runs_just_the_words_given(words: list[str], value: str) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        cluster = ours(folder, words, value, "slurm")
        (folder / "job").write_text(slurm.script(cluster, ["train.py", *words]), newline="")
        run(["bash", "-n", "job"], folder)
        run(["bash", "job"], folder, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="me")
        got = shown(folder)
        assert (got[:2], got[-len(words) - 1 :]) == ([value, cluster.hosts[0].folder], ["train.py", *words])


@every_shell
@given(st.lists(nasty, min_size=1, max_size=4), nasty)
def test_a_line_for_a_shell_over_there_runs_just_the_words_given(words: list[str], value: str) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        process = trainer(ours(folder, words, value, "ssh"), words)
        run(["sh", "-c", by_hand(process)], folder)
        assert shown(folder) == [value, process.host.folder, *process.words[1:]]
        by_ssh = shlex.split(Ssh(SshOptions()).shown(process))
        assert by_ssh == ["ssh", "--", "me", by_hand(process)]
        run(["sh", "-c", Ssh(SshOptions()).arguments(process)[-1]], folder, SHOWN=str(folder / "shown"), NASTY="-")
        assert shown(folder)[2:] == [*BOOT]


def expanded(text: str) -> str:
    """As Kubernetes does, where no variable is known."""
    return re.sub(r"\$\$", "$", text)


@every_shell
@given(st.lists(nasty, min_size=1, max_size=4), nasty)
def test_pods_run_just_the_words_given(words: list[str], value: str) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        cluster = ours(folder, words, value, "kubernetes")
        text = kubernetes.manifests(cluster, ["train.py", *words])
        assert all(line.startswith("#") for line in text.partition("apiVersion")[0].splitlines())
        (trains,) = (one for one in yaml.safe_load_all(text) if one["kind"] == "TrainJob")
        trained = trains["spec"]["trainer"]
        assert list(map(expanded, trained["args"][-len(words) - 1 :])) == ["train.py", *words]
        assert expanded({one["name"]: one["value"] for one in trained["env"]}["NASTY"]) == value
        serving = replace(cluster, mode="server-client", hosts=(replace(cluster.hosts[0], serves=True),))
        found = {one["kind"]: one for one in yaml.safe_load_all(kubernetes.manifests(serving, ["train.py", *words]))}
        container = found["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]
        variables = {one["name"]: expanded(one["value"]) for one in container["env"] if "value" in one}
        assert variables["NASTY"] == value
        run([expanded(word) for word in container["command"]], folder, **variables, POD_NAME="it-0")
        assert shown(folder)[2:6] == ["-m", "hoploom", "serve", f"{folder}/it's a $store"]


def test_the_name_of_a_cluster_file_stays_in_its_comment(tmp_path: Path) -> None:
    cluster = ours(tmp_path, ["\x1b[31m\ntouch hacked"], "", "slurm")
    named = "# Written by `hoploom launch my\\n\\x1b[31m\\ntouch hacked.toml`"
    for text in (slurm.script(cluster, ["train.py"]), kubernetes.manifests(cluster, ["train.py"])):
        assert any(line.startswith(named) for line in text.splitlines())


def test_a_word_that_is_not_utf8_reaches_sbatch_as_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\ncat >job")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    assert slurm.submit(ours(tmp_path, ["x"], "", "slurm"), ["train.py", "a\udcff"]) == 0
    assert b"train.py 'a\xff'" in (tmp_path / "job").read_bytes()


@pytest.mark.parametrize("begin", [["script.py"], ["python", "script.py"], ["-m", "package.script"]])
@pytest.mark.parametrize("leading", [[], ["--"]])
def test_a_programs_arguments_reach_it_unchanged_even_those_that_look_like_ours(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    begin: list[str],
    leading: list[str],
) -> None:
    (tmp_path / "cluster.toml").write_text('hosts = ["127.0.0.1"]\n')
    monkeypatch.chdir(tmp_path)
    arguments = [*leading, "--config=sage.yml", "--epochs", "5", "--dry-run", "--executor=slurm", "--help"]
    arguments += ["--master-port", "1", "--nproc-per-node=9", "--", "-m", "it's one"]
    assert main(["launch", "cluster.toml", "--dry-run", "--", *begin, *arguments]) == 0
    line = shlex.split(capsys.readouterr().out.splitlines()[1])
    parsed = torchrun_words(line[line.index("torch.distributed.run") + 1 :])
    assert [parsed.module, parsed.training_script] == [begin[0] == "-m", begin[-1]]
    assert parsed.training_script_args == arguments


def test_a_container_without_a_working_directory_takes_no_relative_script(tmp_path: Path) -> None:
    def written(command: str, option: str = "") -> str:
        text = f'hosts = 1\nexecutor = "slurm"\n[slurm]\nsrun = ["--container-image=pyg"{option}]\n'
        (tmp_path / "cluster.toml").write_text(text)
        return slurm.script(read_cluster(tmp_path / "cluster.toml"), command.split())

    with pytest.raises(ConfigError, match=r"the script 'train\.py' is a relative path, but slurm\.srun has no"):
        written("train.py --epochs 1")
    assert " /workspace/train.py" in written("/workspace/train.py")
    assert " -m package.train" in written("-m package.train")
    assert " train.py --epochs 1" in written("train.py --epochs 1", ', "--container-workdir=/workspace"')
