"""What stands behind a program in `hoploom launch` is the program's."""

import shlex
from pathlib import Path

import pytest
from torch.distributed.run import parse_args as torchrun_words

from hoploom.cli import main
from hoploom.deploy import slurm
from hoploom.deploy.resolve import read_cluster
from hoploom.errors import ConfigError


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
