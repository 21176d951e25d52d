"""DGL's "Stochastic Training of GNN with Multiple GPUs" in its own form, on the CPU: dgl_multi_gpu.py PORT FOLDER."""

import sys

import numpy as np
import sklearn.metrics
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hoploom
from hoploom.nn import SAGEConv

PORT, PATH = sys.argv[1], f"{sys.argv[2]}/graph.store"


def load_data():
    graph = hoploom.open(PATH)
    node_features, node_labels = graph.x[:], graph.y[:]
    train_nids, valid_nids, test_nids = (graph.split(name) for name in ("train", "val", "test"))
    num_features = node_features.shape[1]
    num_classes = (node_labels.max() + 1).item()
    return graph, node_features, node_labels, train_nids, valid_nids, test_nids, num_features, num_classes


class MultiLayerNeighborSampler:
    def __init__(self, fanouts):
        self.fanouts = fanouts

    def sample_frontier(self, layer_id, g, seed_nodes):
        fanout = layer_id.fanout
        return g.sample_neighbors(seed_nodes, fanout)


def create_dataloader(rank, world_size, graph, nids):
    partition_size = len(nids) // world_size
    partition_offset = partition_size * rank
    nids = nids[partition_offset : partition_offset + partition_size]

    sampler = MultiLayerNeighborSampler([4, 4, 4])
    return hoploom.NeighborLoader(
        graph,
        sampler.fanouts,
        nids,
        mode="blocks",
        sample_frontier=sampler.sample_frontier,
        batch_size=128,
        shuffle=True,
        drop_last=False,
        num_workers=0,
    )


class SAGE(nn.Module):
    def __init__(self, in_feats, n_hidden, n_classes, n_layers):
        super().__init__()
        self.n_layers = n_layers
        self.n_hidden = n_hidden
        self.n_classes = n_classes
        self.layers = nn.ModuleList()
        self.layers.append(SAGEConv(in_feats, n_hidden, aggr="mean"))
        for _ in range(1, n_layers - 1):
            self.layers.append(SAGEConv(n_hidden, n_hidden, aggr="mean"))
        self.layers.append(SAGEConv(n_hidden, n_classes, aggr="mean"))

    def forward(self, bipartites, x):
        for number, (layer, bipartite) in enumerate(zip(self.layers, bipartites, strict=True)):
            x = layer(x, bipartite.edge_index, x[: bipartite.num_destinations])
            if number != self.n_layers - 1:
                x = F.relu(x)
        return x


def init_model(rank, in_feats, n_hidden, n_classes, n_layers):
    model = SAGE(in_feats, n_hidden, n_classes, n_layers)
    return DistributedDataParallel(model)


def train(rank, world_size, data):
    torch.distributed.init_process_group(
        backend="gloo", init_method=f"tcp://127.0.0.1:{PORT}", world_size=world_size, rank=rank
    )
    torch.set_num_threads(1)
    _graph, node_features, node_labels, train_nids, valid_nids, _, num_features, num_classes = data
    graph = hoploom.open(PATH)

    train_dataloader = create_dataloader(rank, world_size, graph, train_nids)
    # We only use one worker for validation
    valid_dataloader = create_dataloader(0, 1, graph, valid_nids)

    model = init_model(rank, num_features, 128, num_classes, 3)
    opt = torch.optim.Adam(model.parameters())
    torch.distributed.barrier()

    best_accuracy = 0
    best_model_path = f"{sys.argv[2]}/model.pt"
    for epoch in range(3):
        model.train()
        num_seeds = 0
        for step, batch in enumerate(train_dataloader):
            input_nodes, output_nodes, bipartites = batch.n_id, batch.n_id[: batch.batch_size], batch.blocks
            inputs = node_features[input_nodes]
            labels = node_labels[output_nodes]
            predictions = model(bipartites, inputs)

            loss = F.cross_entropy(predictions, labels)
            opt.zero_grad()
            loss.backward()
            opt.step()
            num_seeds += len(output_nodes)

            if rank == 0 and step % 10 == 0:
                print(f"Epoch {epoch:05d} Step {step:05d} Loss {loss.item():.04f}", flush=True)
        print(f"rank {rank} read {num_seeds} seeds", flush=True)

        torch.distributed.barrier()

        if rank == 0:
            model.eval()
            predictions = []
            labels = []
            with torch.no_grad():
                for batch in valid_dataloader:
                    labels.append(node_labels[batch.n_id[: batch.batch_size]].numpy())
                    predictions.append(model.module(batch.blocks, node_features[batch.n_id]).argmax(1).numpy())
            predictions = np.concatenate(predictions)
            labels = np.concatenate(labels)
            accuracy = sklearn.metrics.accuracy_score(labels, predictions)
            print(f"Epoch {epoch} Validation Accuracy {accuracy} of {len(labels)} seeds", flush=True)
            if best_accuracy < accuracy:
                best_accuracy = accuracy
                torch.save(model.module.state_dict(), best_model_path)

        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    hoploom.generate(PATH, num_nodes=2001, num_features=16, num_classes=4)
    procs = []
    mp.set_start_method("spawn")  # as the tutorial's caveats say: the graph is opened in train, and held once
    data = (None, *load_data()[1:])
    for proc_id in range(2):
        p = mp.Process(target=train, args=(proc_id, 2, data))
        p.start()
        procs.append(p)
    for p in procs:
        p.join()
    sys.exit(max(p.exitcode for p in procs))
