"""`hoploom train` over a placed store: [placement] is done, and changes nothing of what is learned."""

import re
import sys
from pathlib import Path

import pytest
import torch

import hoploom
from hoploom import ConfigError
from hoploom.ranks.context import init
from hoploom.train.runs.run import run
from hoploom.train.runs.run_file import RunFile, parse_run_file, to_toml

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUN_FILE = """
store = "graph.store"
[model]
hidden = 8
[loader]
fanouts = [3, 2]
batch_size = 64
threads = 1
[train]
epochs = 1
[output]
loggers = []
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("placed")
    hoploom.generate(folder / "graph.store", num_nodes=200, avg_degree=4, num_features=8, num_classes=3, num_parts=2)
    return folder


def _run_file(here: Path, name: str, *overrides: str) -> RunFile:
    return parse_run_file(RUN_FILE, [f"output.folder={here / name}", *overrides], folder=here)


def test_a_share_of_the_features_is_text_or_a_number() -> None:
    section = RUN_FILE + "[placement]\nfeatures = "
    for text, share in {"0.2": 0.2, "0.0": 0.0, "'20%'": "20%", "'4GB'": "4GB"}.items():
        run_file = parse_run_file(section + text)
        assert (run_file.placement.features, parse_run_file(to_toml(run_file))) == (share, run_file)
    for override, share in {"0.3": 0.3, "30%": "30%", "3MB": "3MB", " host": "host"}.items():
        assert parse_run_file(section + "'auto'", [f"placement.features={override}"]).placement.features == share


def test_a_run_file_that_cannot_be_placed_says_where_it_is_wrong(here: Path) -> None:
    why = r"--set placement.features=7B: the store cannot be placed: features is 7 bytes, .* or leave \[placement\] out"
    with pytest.raises(ConfigError, match=why), init(device=DEVICE) as context:
        run(_run_file(here, "refused", "placement.features=7B"), context, progress=False)


def no_triton() -> bool:
    raise ConfigError("placing needs Triton")


KERNELS = {"interpreted": lambda: True, "not interpreted": lambda: False, "no Triton": no_triton}
ALL = ("topology=cuda", "features=cuda", "topology=auto", "features=20%")


@pytest.mark.parametrize(
    ("kernels", "given"),
    [*(("not interpreted", given) for given in ALL), *((kernels, ALL[0]) for kernels in ("interpreted", "no Triton"))],
)
def test_a_run_on_the_cpu_is_told_to_leave_placement_out(
    here: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, given: str
) -> None:
    monkeypatch.setattr(sys.modules["hoploom.train.runs.run"], "kernels_are_interpreted", KERNELS[kernels])
    key = f"placement.{given.partition('=')[0]}"
    no_gpu = "its context was made so" if torch.cuda.is_available() else "there is no GPU here"
    for why, overrides in {no_gpu: (), 'train.device is "cpu"': ("train.device=cpu",)}.items():
        said = f"--set placement.{given}: {key} has no effect: this run is on cpu ({why}); leave [placement] out"
        with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"), init(device="cpu") as context:
            run(_run_file(here, "refused", f"placement.{given}", *overrides), context, progress=False)


@pytest.mark.parametrize(
    ("kind", "size"),
    [pytest.param("link-prediction", 200, marks=pytest.mark.slow), ("node-classification", 40)],
)
def test_a_run_of_whole_steps_ends_as_one_of_eager_steps(here: Path, kind: str, size: int) -> None:
    found = []
    for whole in ("true", "false"):
        changed = f"train.whole_steps={whole}", f"task.kind={kind}", f"loader.batch_size={size}"
        placement = f"placement.topology={DEVICE}", f"placement.features={DEVICE}"
        with init(device=DEVICE) as context:
            found.append(run(_run_file(here, f"{kind} {whole}", *changed, *placement), context, progress=False))
    whole_steps, eager = found
    counts = whole_steps.outcome.whole_steps
    assert counts is not None
    assert counts.first + counts.replayed > 0
    assert eager.outcome.whole_steps is None
    assert whole_steps.outcome.steps == eager.outcome.steps
    assert whole_steps.test == pytest.approx(eager.test, abs=1e-4)
