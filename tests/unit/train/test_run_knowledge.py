"""Knowledge graphs in run.toml: each link keeps the number of its relation, and each relation has its own metrics."""

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hoploom
from hoploom import ConfigError, Store
from hoploom.cli import main
from hoploom.ranks.context import init
from hoploom.train.runs.link_splits import write_links
from hoploom.train.runs.run import complete_setup, eval_loader, make_model, train_loader, training_setup
from hoploom.train.runs.run_file import parse_run_file

ALONE: Any = SimpleNamespace(rank=0, world_size=1, num_cores=2, device=torch.device("cpu"))
TRIPLES = """
store = "kg.store"
[task]
kind = "link-prediction"
relation_field = "edge_type"
loss = "softmax"
negatives = 32
eval_negatives = 20
val_share = 0.1
test_share = 0.2
[model]
hidden = 32
residual = true
decoder = "complex"
[loader]
fanouts = [2]
batch_size = 128
threads = 1
[optimizer]
lr = 0.02
[train]
device = "cpu"
[output]
loggers = []
"""


def families(**options: Any) -> tuple[Store, torch.Tensor, torch.Tensor]:
    """A store, its links and the numbers of their relations.

    Relations 0 and 1 lead from each of 10 families of 10 to members of another, relation 2 to anybody. The edges are in
    no order, and some pairs have several relations.
    """
    torch.manual_seed(0)
    heads, numbers = torch.arange(1800) % 100, torch.arange(3).repeat_interleave(600)
    family = (heads // 10 + torch.tensor([3, 6, 0])[numbers]) % 10
    tails = torch.where(numbers == 2, torch.randint(100, (1800,)), family * 10 + torch.randint(10, (1800,)))
    order = torch.randperm(1800)
    links, numbers = torch.stack([heads, tails])[:, order], numbers[order]
    fields = {"edge_type": numbers, "weight": torch.rand(1800), **options}
    edges = {("node", "to", "node"): {"edge_index": links, **fields}}
    return hoploom.from_tensors({"node": {"original_id": torch.arange(100) * 2}}, edges), links, numbers


def triples(links: torch.Tensor, numbers: torch.Tensor) -> list[list[int]]:
    return sorted(torch.cat([links, numbers[None]]).t().tolist())


@pytest.mark.parametrize("suffix", ["csv", "parquet", "npy"])
def test_each_link_of_a_knowledge_graph_has_the_number_of_its_relation(
    tmp_path: Path, suffix: str, one_thread: None, no_sync: None
) -> None:
    """In a random split, and if the links of its files are given back."""
    store, links, numbers = families()
    store.save(tmp_path / "kg.store")
    store = hoploom.open(tmp_path / "kg.store")
    drawn = training_setup(parse_run_file(TRIPLES), store)
    ends = {split: links_of_split for split, (_, links_of_split) in drawn.seeds.items()}
    found = [triples(ends[split], drawn.relations[split]) for split in ("train", "val", "test")]
    assert sorted(chain(*found)) == triples(links, numbers)
    assert min(map(len, found)) > 50
    write_links(tmp_path / "links", store, drawn.seeds, {"edge_type": drawn.relations}, keep=False)
    for path in list((tmp_path / "links").glob("*.csv")):
        if suffix == "npy":
            rows = torch.cat([ends[path.stem], drawn.relations[path.stem][None]])
            np.save(path.with_suffix(".npy"), rows.numpy())
        elif suffix == "parquet":
            pandas, parquet = pytest.importorskip("pyarrow.csv"), pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pandas.read_csv(path), path.with_suffix(".parquet"))
        if suffix != "csv":
            path.unlink()
    given = training_setup(parse_run_file(TRIPLES, [f'task.links="{tmp_path / "links"}"']), store)
    for split, own in drawn.relations.items():
        assert torch.equal(given.relations[split], own)
    assert given.task == drawn.task
    run_file = parse_run_file(TRIPLES)
    with init(device="cpu") as context:
        drawn = complete_setup(run_file, store, context)
    model = make_model(run_file, drawn)
    assert model.decoder.relations.weight.shape == (3, 32)  # type: ignore[union-attr]
    loaders = train_loader(run_file, drawn, ALONE, model), eval_loader(run_file, drawn, ALONE, model, "val")
    for loader, wanted in zip(loaders, found, strict=False):
        batches = [(batch["node"], batch["node", "to", "node"].edge_label) for batch in loader]
        predicted = [
            torch.cat([nodes.n_id[torch.stack([nodes.src_index, nodes.dst_pos_index])], label[None]])
            for nodes, label in batches
        ]
        assert sorted(torch.cat(predicted, dim=1).t().tolist()) == wanted


NO_NUMBERS = [
    (["task.relation_field=edge_typ"], {}, "no field of 'node to node' with an integer .*did you mean 'edge_type'"),
    (["task.relation_field=weight"], {}, r"task.relation_field is 'weight', no field .*there are \['edge_type'\]"),
    (["task.relation_field=wide"], {"wide": torch.ones(1800, 2).long()}, "'wide', no field of 'node to node' with an"),
    (
        ["task.relation_field=low"],
        {"low": torch.arange(1800) - 1},
        "'low' has the number -1; number the relations 0, 1",
    ),
    (["task.relation_field=many"], {"many": torch.arange(1800) * 9999}, "'many' has the number 17[0-9]*; number"),
]


@pytest.mark.parametrize(("overrides", "fields", "message"), NO_NUMBERS, ids=[one[0][0] for one in NO_NUMBERS])
def test_a_field_without_numbers_of_relations_is_refused(overrides: list[str], fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--set task.relation_field=.*{message}"):
        training_setup(parse_run_file(TRIPLES, overrides), families(**fields)[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("source,destination\n2,4\n", "name those with .* destination, and that with the relations edge_type"),
        ("source,destination,edge_type\n2,4,likes\n", "'edge_type' is not 0, 1, 2, ... in all rows; give each link"),
        ("source,destination,edge_type\n2,4,-1\n", "'edge_type' is not 0, 1, 2, ... in all rows; give each link"),
        ("source,destination,edge_type\n2,4\n", "too few values; give each link its source and destination and edge_t"),
    ],
)
def test_links_in_a_file_without_numbers_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "val.csv").write_text(content)
    with pytest.raises(ConfigError, match=rf"task.links=.*val.csv: .*{message}"):
        training_setup(parse_run_file(TRIPLES, [f'task.links="{tmp_path}"']), families()[0])


def test_a_planted_knowledge_graph_is_learned_and_its_random_relation_is_the_worst(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None, no_sync: None
) -> None:
    """By the command, in one process and in two, which find the same for each relation."""
    families()[0].save(tmp_path / "kg.store")
    (tmp_path / "run.toml").write_text(TRIPLES)
    words = ["train", str(tmp_path / "run.toml"), "--set", f"output.folder={tmp_path / 'alone'}"]
    assert main(words) == 0
    alone = json.loads((tmp_path / "alone" / "result.json").read_text())["test"]
    mrr = [alone[f"relations/{number}/mrr"] for number in range(3)]
    assert min(mrr[:2]) > 0.4 > 0.3 > mrr[2]
    command = [sys.executable, "-m", "hoploom", "train", "run.toml", "--set", "train.processes=2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    two = json.loads((tmp_path / "run" / "result.json").read_text())["test"]
    assert {name: count for name, count in two.items() if "links" in name} == {
        name: count for name, count in alone.items() if "links" in name
    }
    assert two == pytest.approx(alone, abs=0.02)
    assert main([*words, "--set", "train.epochs=11", "--resume"]) == 0
    capsys.readouterr()
    assert main(["infer", str(tmp_path / "alone"), "--best", "3"]) == 2
    said = capsys.readouterr().err
    assert "--best writes one list for each source; call hoploom.best instead: " in said
    assert "has 3 relations; give the number of each link's" in said
