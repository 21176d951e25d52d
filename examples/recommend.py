"""From three tables to ten items for every user: build a store, train, judge by rank, and write a table.

    python examples/recommend.py                     # tables that it makes, with tastes that no column tells
    python examples/recommend.py --tables my_shop    # your own: users.csv, items.csv and ratings.csv

The columns are `user`; `item`; and `user`, `item`, `stars` and `time`. Users and items have no features, so each gets a
learned row. A held-out rating is ranked among 100 random items. In the tables that it makes, a model that knows all
tastes, and nothing else, has an MRR of 0.25: one in 8 items is as good as the right one.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
from torch_geometric.sampler import NegativeSampling

import hoploom
from hoploom import LinkNeighborLoader, LinkPrediction
from hoploom.inference import Inference
from hoploom.inference.best_links import write_best
from hoploom.ingest.tables.build import BuildOptions, build
from hoploom.ingest.tables.graph_file import parse_graph
from hoploom.nn import GNN, Shape
from hoploom.train import Learner, Training
from hoploom.train.runs.link_splits import LinkShares, hold_out

TASTES, ITEMS, USERS, RATINGS = 8, 25, 600, 12  # items of each taste; ratings of each user
RATES, RATED = ("user", "rates", "item"), ("item", "rev_rates", "user")
GRAPH = """
[nodes.user]
files = "users.csv"
id = "user"

[nodes.item]
files = "items.csv"
id = "item"

[edges."user rates item"]
files = "ratings.csv"
source = "user"
destination = "item"
fields = { stars = "stars" }
time = "time"
reverse = true
"""


def write_tables(folder: Path) -> None:
    """Every user rates items of one taste."""
    folder.mkdir(parents=True)
    random.seed(0)
    ratings = []
    for user in range(USERS):
        for item in random.sample(range(user % TASTES, TASTES * ITEMS, TASTES), RATINGS):
            ratings.append(f"u{user},i{item},{random.randint(3, 5)},2024-03-{random.randint(1, 28):02d}")
    users, items = ([f"{kind}{n}" for n in range(count)] for kind, count in (("u", USERS), ("i", TASTES * ITEMS)))
    for name, lines in (("users", ["user", *users]), ("items", ["item", *items])):
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    (folder / "ratings.csv").write_text("\n".join(["user,item,stars,time", *ratings]) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("."))
    parser.add_argument("--tables", type=Path, help="a folder with users.csv, items.csv and ratings.csv")
    parser.add_argument("--epochs", type=int, default=8)
    words = parser.parse_args(argv)
    tables, path = words.tables or words.folder / "shop", words.folder / "shop.store"
    made = [path, words.folder / "nodes", *([tables] if words.tables is None else [])]
    for taken in filter(Path.exists, made):  # before `init`, where ranks wait for each other
        parser.error(f"{taken} exists already; remove it, or name another --folder")
    with hoploom.init() as context:
        if context.is_main:
            if words.tables is None:
                write_tables(tables)
            build(parse_graph(GRAPH, folder=tables), path, BuildOptions())
        context.barrier()
        whole = hoploom.open(path)
        held_out = hold_out(whole, RATES, [RATED], LinkShares(seed=0, val=0.0, test=0.1))
        store, links = held_out.store, held_out.links

        def loader(split: str, fanouts: list[int], negatives: int, **options: Any) -> LinkNeighborLoader:
            given = {"neg_sampling": NegativeSampling("triplet", negatives), "batch_size": 256, **options}
            return LinkNeighborLoader(store, fanouts, (RATES, links[split]), **given)

        for node_type in ("user", "item"):  # neither has features, so their rows are learned
            store = hoploom.Embedding(store, node_type, dim=32, init="normal", context=context).store
        torch.manual_seed(0)
        model = context.wrap(GNN("sage", store.schema, Shape(hidden=32, num_layers=2, out=32)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        task = LinkPrediction(loss="softmax", metrics=["mrr", "hits@10"])
        # exclude: the ratings that a step predicts are not among its messages
        learner = Learner(model, optimizer, task, loader("train", [10, 10], 20, shuffle=True, exclude="both"))
        hoploom.fit(learner, Training(words.epochs), context)
        found = hoploom.evaluate(model, loader("test", [-1, -1], 100), task, context)
        out = words.folder / "nodes"
        hoploom.infer(model, store, out, context, inference=Inference(columns=["output"]))
        best = write_best(whole, out, RATES, 10, context)  # without the items that a user has rated
        if context.is_main:
            print(f"MRR {found['mrr']:.3f}, hits@10 {found['hits@10']:.3f}")
            for row in pyarrow.parquet.read_table(best).slice(length=10).to_pylist():
                print(f"{row['id']}: {row['rank']}. {row['destination']}, {row['score']:.2f}")


if __name__ == "__main__":
    main()
