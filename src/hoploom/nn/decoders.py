"""Decoders: modules that score a link from the rows of its two ends, and of its relation in a knowledge graph.

LinkPrediction uses the attribute `decoder` of a model: `model.decoder = Bilinear(64)`. Rows may have any leading
dimensions that broadcast: sources [n, 1, d] and destinations [n, k, d] give scores [n, k]. Rows of complex numbers hold
the real parts first, then the imaginary ones.
"""

import copy
import math
from collections.abc import Mapping
from typing import Self, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from hoploom.config.values import as_int
from hoploom.errors import ConfigError
from hoploom.schema import check_ids

AT_ONCE = 1 << 22  # values of pairs of rows that are in memory at a time


class Decoder(nn.Module):
    """Base of decoders. `relations` are the numbers of the links' relations, for decoders that have several.

    A decoder with `edge_channels` also scores by features of the links: they follow the channels of a source's row.
    """

    edge_channels: int = 0

    def __init_subclass__(cls) -> None:
        """Drop an inherited `against` that does not know the class's own `forward`."""
        owner = next(base for base in cls.__mro__ if vars(base).keys() & {"against", "forward"})
        if "against" not in vars(owner):
            cls.against = Decoder.against  # type: ignore[method-assign]

    def forward(self, sources: Tensor, destinations: Tensor, relations: Tensor | None = None) -> Tensor:
        """Return one score per link; the higher, the likelier."""
        raise NotImplementedError

    def against(self, sources: Tensor, destinations: Tensor, relations: Tensor | None = None) -> Tensor:
        """Return the score of every source [n, d] with every destination [m, d]: [n, m]. `relations` are [n].

        This takes `forward` of some pairs at a time; decoders whose scores are products or distances are faster.
        """
        some = max(1, AT_ONCE // max(1, sources.numel()))
        found = [self(sources[:, None], rows, relations) for rows in torch.split(destinations, some)]
        return torch.cat(found, dim=1)

    def check(self, relations: Tensor | None) -> None:
        """Raise ConfigError unless the decoder can score links of these relations; None if links have no number."""

    def check_features(self, num_features: int) -> None:
        """Raise ConfigError unless the decoder takes this number of features of each link."""
        if num_features != self.edge_channels:
            wanted = f"{type(self).__name__} has edge_channels={self.edge_channels}"
            way_out = "take MLP(..., edge_channels=k) and LinkPrediction(features=...) of k columns, or neither"
            raise ConfigError(f"the decoder {wanted}, and a link has {num_features} features; {way_out}")


class Dot(Decoder):
    """The dot product of both rows. In a class derived from this one, `query` changes the source's row first."""

    def query(self, sources: Tensor, relations: Tensor | None) -> Tensor:
        """Return the rows whose dot product with a destination is its score."""
        return sources

    def forward(self, sources: Tensor, destinations: Tensor, relations: Tensor | None = None) -> Tensor:
        return (self.query(sources, relations) * destinations).sum(-1)

    def against(self, sources: Tensor, destinations: Tensor, relations: Tensor | None = None) -> Tensor:
        query = self.query(sources, relations)
        return query @ destinations.t().to(query.dtype)


def is_product(decoder: Decoder) -> TypeGuard[Dot]:
    """Return whether the scores are products of `query` and destinations: a class may have its own `forward`."""
    return type(decoder).against is Dot.against


class Cosine(Decoder):
    """The cosine of the angle between both rows."""

    def forward(self, sources: Tensor, destinations: Tensor, relations: Tensor | None = None) -> Tensor:
        return functional.cosine_similarity(_wide(sources), _wide(destinations), dim=-1)

    def against(self, sources: Tensor, destinations: Tensor, relations: Tensor | None = None) -> Tensor:
        left, right = (functional.normalize(_wide(rows), dim=-1, eps=1e-8) for rows in (sources, destinations))
        return left @ right.t()


class MLP(Decoder):
    """A network of two layers over both rows, joined.

    With `edge_channels`, the input is source row, link features, destination row.
    """

    def __init__(self, channels: int, hidden: int, *, edge_channels: int = 0) -> None:
        super().__init__()
        way_out = "give the number of features of a link, 0 for none"
        self.channels, self.edge_channels = channels, as_int("edge_channels", edge_channels, 0, way_out)
        self.layers = nn.Sequential(nn.Linear(2 * channels + edge_channels, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, sources: Tensor, destinations: Tensor, relations: Tensor | None = None) -> Tensor:
        found, wanted = (sources.shape[-1], destinations.shape[-1]), (self.channels + self.edge_channels, self.channels)
        if found != wanted:
            what = f"sources and destinations are rows of {found[0]} and {found[1]} columns, and the decoder takes"
            raise ConfigError(f"{what} {wanted[0]} and {wanted[1]}; give MLP the width of a node's row as channels")
        weight, bias = (self.layers.get_parameter(name) for name in ("0.weight", "0.bias"))
        left, right = torch.split(weight, list(wanted), 1)  # each row passes once
        joined = functional.linear(sources, left, bias) + functional.linear(destinations, right)
        scores: Tensor = self.layers[1:](joined)
        return scores.squeeze(-1)


class OfRelations(Decoder):
    """Base of decoders that learn a row for each relation. With one relation, `relations` may be left out."""

    def __init__(self, channels: int, num_relations: int = 1, *, width: int | None = None) -> None:
        super().__init__()
        self.relations = nn.Embedding(num_relations, width or channels)
        nn.init.xavier_uniform_(self.relations.weight)

    def rows(self, relations: Tensor | None, like: Tensor) -> Tensor:
        """Return the rows of relations [...], with as many dimensions as the rows `like`."""
        if relations is None:
            self.check(relations)
            return self.relations.weight[0]
        found: Tensor = self.relations(relations.long())
        return found.view(*found.shape[:-1], *[1] * (like.dim() - found.dim()), found.shape[-1])

    def check(self, relations: Tensor | None) -> None:
        count = self.relations.num_embeddings
        if relations is not None:
            check_ids("relations", relations, count, ConfigError)
        elif count > 1:
            way_out = "(edge_label of a loader), or choose one, such as decoder=model.decoder.only(3)"
            raise ConfigError(f"{type(self).__name__} has {count} relations; give the number of each link's {way_out}")

    def only(self, relation: int) -> Self:
        """Return a copy that has this relation alone, such as for hoploom.best."""
        self.check(torch.tensor([relation]))
        own = copy.deepcopy(self)
        own.relations = nn.Embedding(
            1, self.relations.embedding_dim, _weight=self.relations.weight[[relation]].detach()
        )
        return own


class Bilinear(OfRelations, Dot):
    """A bilinear form: source · M · destination, with a matrix for each relation (RESCAL)."""

    def __init__(self, channels: int, num_relations: int = 1) -> None:
        super().__init__(channels, num_relations, width=channels * channels)

    def query(self, sources: Tensor, relations: Tensor | None) -> Tensor:
        matrices = self.rows(relations, sources)
        matrices = matrices.view(*matrices.shape[:-1], *2 * sources.shape[-1:])
        return (sources.unsqueeze(-2) @ matrices).squeeze(-2)


class DistMult(OfRelations, Dot):
    """A dot product weighted by the relation's row (Yang et al. 2015). Both directions have the same score."""

    def query(self, sources: Tensor, relations: Tensor | None) -> Tensor:
        return sources * self.rows(relations, sources)


class ComplEx(OfRelations, Dot):
    """DistMult with complex numbers (Trouillon et al. 2016), which tells directions apart."""

    def query(self, sources: Tensor, relations: Tensor | None) -> Tensor:
        product = _complex(sources) * _complex(self.rows(relations, sources))
        return torch.cat([product.real, product.imag], dim=-1)


class TransE(OfRelations):
    """The negative distance between source + relation and destination (Bordes et al. 2013), by the `p`-norm."""

    def __init__(self, channels: int, num_relations: int = 1, *, p: float = 1.0) -> None:
        super().__init__(channels, num_relations)
        self.p = p

    def forward(self, sources: Tensor, destinations: Tensor, relations: Tensor | None = None) -> Tensor:
        between = sources + self.rows(relations, sources) - destinations
        distances: Tensor = torch.linalg.vector_norm(between, self.p, dim=-1)
        return -distances

    def against(self, sources: Tensor, destinations: Tensor, relations: Tensor | None = None) -> Tensor:
        moved, exact = _wide(sources + self.rows(relations, sources)), "donot_use_mm_for_euclid_dist"
        return -torch.cdist(moved, destinations.to(moved.dtype), self.p, compute_mode=exact)


class RotatE(OfRelations):
    """The negative distance between the source, rotated by the relation, and the destination (Sun et al. 2019)."""

    def __init__(self, channels: int, num_relations: int = 1) -> None:
        super().__init__(channels, num_relations, width=channels // 2)
        nn.init.uniform_(self.relations.weight, -math.pi, math.pi)

    def forward(self, sources: Tensor, destinations: Tensor, relations: Tensor | None = None) -> Tensor:
        angles = _wide(self.rows(relations, sources))
        rotated = _complex(sources) * torch.polar(torch.ones_like(angles), angles)
        return -(rotated - _complex(destinations)).abs().sum(-1)


def _wide(rows: Tensor) -> Tensor:
    """Return rows of half types as float32: they have no complex numbers, and their squares underflow."""
    return rows.float() if rows.dtype.itemsize < 4 else rows


def _complex(rows: Tensor) -> Tensor:
    """Return rows [..., 2 d] as complex numbers [..., d]."""
    if rows.shape[-1] % 2:
        raise ConfigError(f"rows have {rows.shape[-1]} channels; complex numbers need an even number")
    return torch.complex(*_wide(rows).chunk(2, dim=-1))


DECODERS: Mapping[str, type[Decoder]] = {  # by their names in run.toml
    kind.__name__.lower(): kind for kind in (Dot, Cosine, DistMult, ComplEx, TransE, RotatE, Bilinear)
}
