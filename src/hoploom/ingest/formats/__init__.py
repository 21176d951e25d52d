"""Graphs from other tools' files and objects: OGB, GLT partitions, DGL."""

from hoploom.ingest.formats.dgl import from_dgl
from hoploom.ingest.formats.glt import import_glt
from hoploom.ingest.formats.ogb import import_ogb

__all__ = ["from_dgl", "import_glt", "import_ogb"]
