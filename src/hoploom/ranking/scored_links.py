"""The links of a batch whose scores are wanted, with candidates or labels, and what is known of a loader's links."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData

from hoploom.errors import ConfigError, DataError
from hoploom.load.assemble import Batch
from hoploom.load.maker import LinkMaker
from hoploom.nn.decoders import Decoder, Dot
from hoploom.ops import rows as _rows
from hoploom.ranks.context import unwrap
from hoploom.sample.exclusions import match_edges
from hoploom.schema import EDGE_ID, RelationName
from hoploom.store import Wanted


class ScoredLinks(NamedTuple):
    """The links of a batch whose scores are wanted."""

    key: RelationName
    ends: Tensor  # [2, n] int64 local ids
    numbers: Tensor  # of the true links, among those of the loader
    labels: Tensor | None = None  # [n]
    relations: Tensor | None = None  # [n / width] of the true links
    width: int | None = None  # links per row, a true one and its candidates; 0: the others are candidates; None: labels
    shared: Tensor | None = None  # [width - 1] local ids: candidates of all true links, which alone are in `ends`
    n_id: Tensor | None = None  # of local ids of the destinations' type, which may have a node several times
    features: Tensor | None = None  # [rows, k]: of each true link, or label

    @property
    def types(self) -> tuple[str, str]:
        """The node types of sources and destinations."""
        return self.key[0], self.key[2]

    def with_features(self, features: Tensor) -> "ScoredLinks":
        """Return the links with features, rows of those of the loader.

        Labels are the true links, then one negative of each, and so on, so the features repeat.
        """
        own, count = features[self.numbers], self.numbers.numel()
        return self._replace(features=own if self.labels is None else own.repeat(self.labels.shape[0] // count, 1))

    def source_rows(self, of_source: Tensor) -> Tensor:
        """Return the source's row for each true link or label, followed by the link's features."""
        rows = of_source.index_select(0, self.ends[0] if self.shared is not None else self.ends[0, :: self.width or 1])
        return rows if self.features is None else torch.cat([rows, self.features.to(rows.dtype)], dim=1)

    def with_candidates(self, drawn: Tensor) -> Tensor:
        """Return the destinations of true links, then their candidates; -1 for one that is the true destination."""
        assert self.n_id is not None
        true = self.ends[1][:, None]
        return torch.cat([true, drawn.masked_fill(self.n_id[drawn] == self.n_id[true], -1)], dim=1)

    def spread(self) -> "ScoredLinks":
        """Return the same links, each candidate with its own entry in `ends`."""
        if self.shared is None:
            return self
        sources = self.ends[0]
        rows = self.with_candidates(self.shared.expand(sources.numel(), -1))
        ends = torch.stack([sources.repeat_interleave(rows.shape[1]), rows.view(-1)])
        return self._replace(ends=ends, shared=None)


def no_candidates(name: str) -> ConfigError:
    return ConfigError(f"{name!r} needs candidates for each true link; use LinkNeighborLoader(neg_sampling='triplet')")


def links_of_batch(batch: Batch, needs_candidates: str) -> ScoredLinks:
    """Return the links of a batch whose scores are wanted, of a task that may need candidates."""
    is_typed = isinstance(batch, HeteroData)
    stores = batch.edge_stores if is_typed else [batch]
    found = [storage for storage in stores if "edge_label_index" in storage or "input_id" in storage]
    if len(found) != 1:
        raise ConfigError("the batch has no links to predict; use LinkNeighborLoader")
    storage, key = found[0], found[0]._key if is_typed else ("node", "to", "node")
    of_source, of_destination = (batch[name] if is_typed else batch for name in (key[0], key[2]))
    if "src_index" in of_source:
        sources, true = of_source["src_index"], of_destination["dst_pos_index"]
        drawn = of_destination["dst_neg_index"].view(sources.numel(), -1)
        ends, relations = torch.stack([sources, true]), storage.get("edge_label")
        links = ScoredLinks(key, ends, storage["input_id"], None, relations, 1 + drawn.shape[1])
        links = links._replace(n_id=of_destination["n_id"])
        if (shared := of_destination.get("dst_neg_shared")) is not None:
            return links._replace(shared=shared)
        destinations = links.with_candidates(drawn).view(-1)
        return links._replace(ends=torch.stack([sources.repeat_interleave(links.width), destinations]))
    if "edge_label" in storage:
        if needs_candidates:
            raise no_candidates(needs_candidates)
        return ScoredLinks(key, storage["edge_label_index"], storage["input_id"], storage["edge_label"])
    if not needs_candidates or "edge_label_index" not in storage:
        raise ConfigError("the batch has no labelled links; use LinkNeighborLoader with neg_sampling='binary'")
    return ScoredLinks(key, storage["edge_label_index"], storage["input_id"], width=0)


def decoder_of(model: nn.Module) -> Decoder:
    """Return the model's decoder, by default dot products; raise ConfigError if it seems to score links otherwise."""
    own = unwrap(model)
    found = getattr(own, "decoder", None)
    if hasattr(own, "score") or not isinstance(found, Decoder | None):
        what = "method `score`" if hasattr(own, "score") else f"`decoder` of type {type(found).__name__}"
        raise ConfigError(
            f"the model has a {what}, which nothing would call; give it a `decoder` that derives from "
            "hoploom.nn.Decoder, let its forward take edge_label_index, or rename it"
        )
    return Dot() if found is None else found


def decoded_scores(decoder: Decoder, links: ScoredLinks, of_source: Tensor, of_destination: Tensor) -> Tensor:
    """Return the decoder's scores of the links, row after row."""
    left, destinations = links.source_rows(of_source), links.ends[1]
    if links.shared is not None:
        right = of_destination.index_select(0, destinations)
        others = decoder.against(left, of_destination.index_select(0, links.shared), links.relations)
        true = decoder(left[:, None], right[:, None], links.relations).to(others.dtype)
        assert links.n_id is not None
        drawn, own = links.n_id[links.shared], links.n_id[destinations]
        # candidates that are the true destination do not count
        if _rows.runs_in_core(destinations):
            hits = torch.isin(own, drawn).nonzero().view(-1)
            others[hits] = others[hits].masked_fill(drawn == own[hits, None], -torch.inf)
        else:  # a GPU would wait for the number of hits
            others = others.masked_fill(drawn == own[:, None], -torch.inf)
        return torch.cat([true, others], dim=1).view(-1)
    if of_destination.shape[0] <= (links.width or 0):  # all nodes are candidates of each link
        every = decoder.against(left, of_destination, links.relations)
        return every.gather(1, destinations.view(-1, links.width or 1)).reshape(-1)
    right = of_destination.index_select(0, destinations)
    if links.width:
        left, right = left[:, None], right.view(-1, links.width, right.shape[-1])
    found: Tensor = decoder(left, right, links.relations)
    return found.reshape(-1)


def values_of_links(name: str, given: str | Tensor, maker: object) -> Tensor:
    """Return the values of a loader's links, [n, k] float32: `given`, or the field of their edges that it names."""
    if not isinstance(maker, LinkMaker) or maker.input_id is not None:
        raise ConfigError(f"{name} is by link of edge_label_index; use a LinkNeighborLoader here, without input_id")
    links, store, key = maker.ends, maker.assembler.store, maker.task.key
    if isinstance(given, str):
        known = sorted(set(store.schema.relation(key).fields) - {EDGE_ID})
        if given not in known:
            raise ConfigError(f"{name} is {given!r}, and edges of {key} have {known}; name one, or give a tensor")
        edges = match_edges(store.graph, store.schema.relation_index[key], links[0], links[1]).to(torch.int64)
        if (missing := (edges < 0).nonzero()).numel():
            ends = links[:, int(missing[0])].tolist()
            raise ConfigError(f"link {ends} is no edge of {key}, so it has no {given!r}; give {name} as a tensor")
        given = store.features.gather([Wanted(key, given, edges)])[0]
    count, is_weight = links.shape[1], name == "weight"
    if given.shape[:1] != (count,) or (is_weight and given.numel() != count):
        each = "number" if is_weight else "row"
        raise ConfigError(f"{name} has shape {list(given.shape)} for {count} links; give one {each} for each")
    values = given.detach().to("cpu", torch.float32).reshape(count, -1)
    is_bad = ~values.isfinite() | (values < 0 if is_weight else False)
    if (bad := is_bad.any(1).nonzero()).numel():
        row, wanted = int(bad[0]), "finite numbers" + " of at least 0" * is_weight
        raise DataError(f"link {links[:, row].tolist()} has {name} {values[row].tolist()!s:.80}; give {wanted}")
    return values
