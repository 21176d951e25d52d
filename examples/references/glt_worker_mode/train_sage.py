"""GLT's dist_train_sage_supervised.py: GraphSAGE on ogbn-products, in worker mode or in server-client mode.

    torchrun --nnodes=2 --node_rank=0 --master_addr=gpu1 train_sage.py --store products.parts  # on gpu1
    torchrun --nnodes=2 --node_rank=1 --master_addr=gpu1 train_sage.py --store products.parts  # on gpu2

The script does not depend on where the graph is: `hoploom.open` returns the right store for the way you start it.
"""

import argparse
import time

import torch
import torch.nn.functional as F  # noqa: N812
from torch_geometric.nn import GraphSAGE

import hoploom
from hoploom import NeighborLoader
from hoploom.load.presample import count_visits
from hoploom.store.row_cache import cached
from hoploom.train import Context, NodeClassification

NUM_NEIGHBORS = [15, 10, 5]


def run_training_proc(context: Context, args: argparse.Namespace) -> None:
    store = hoploom.open(args.store, context=context, servers=args.servers)
    print(f"rank {context.rank} of {context.world_size} maps {len(store.parts)} of {len(store.ranges)} parts")
    common = {"num_neighbors": NUM_NEIGHBORS, "batch_size": args.batch_size, "device": context.device}
    [y] = store.features.gather([("node", "y", store.split("train"))])
    num_features, num_classes = store.schema.node_type("node").fields["x"].shape[0], int(y.max()) + 1
    if store.parts:  # worker mode: keep the rows of other hosts that sampling asks for most
        store = cached(store, args.cache, count_visits(store, NUM_NEIGHBORS, "train"))
    # With locality, a rank gets seeds of its own host's parts as far as equal batches allow; all seeds come once.
    ahead = {"num_workers": 2, "prefetch_factor": 2}
    train_loader = NeighborLoader(store, input_nodes="train", shuffle=True, locality=True, **ahead, **common)
    test_loader = NeighborLoader(store, input_nodes="test", **common)

    torch.manual_seed(0)
    model = context.wrap(GraphSAGE(num_features, hidden_channels=256, num_layers=3, out_channels=num_classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        model.train()
        start = time.time()
        for batch in train_loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size].log_softmax(dim=-1)
            loss = context.mean_loss(F.nll_loss(out, batch.y[: batch.batch_size], reduction="none"))
            loss.backward()
            optimizer.step()
        seconds = time.time() - start
        mean = context.sum(loss) / context.world_size  # over the seeds of all trainers
        print(f"-- [Trainer {context.rank}] Epoch: {epoch:03d}, Loss: {mean:.4f}, Epoch Time: {seconds:.1f}")
    test = hoploom.evaluate(model, test_loader, NodeClassification(num_classes), context)
    if context.is_main:
        print(f"Test accuracy {test['accuracy']:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", help="the store in parts; hoploom launch names it")
    parser.add_argument("--servers", help="host:port,...: graph servers that run already")
    parser.add_argument("--cache", default="20%", help="of the other hosts' rows; a share, or a size such as 4GB")
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--num_training_procs", type=int, default=torch.cuda.device_count() or 1, help="without torchrun"
    )
    args = parser.parse_args()
    if torch.distributed.is_torchelastic_launched():  # by torchrun, or by hoploom launch
        with hoploom.init() as context:
            run_training_proc(context, args)
    else:
        hoploom.spawn(run_training_proc, args.num_training_procs, [args])
