"""Graphs from other tools' files and objects: OGB, NumPy and SciPy archives, GLT partitions, DGL."""

from hoploom.build.importing.archives import import_archive
from hoploom.build.importing.dgl import from_dgl
from hoploom.build.importing.glt import import_glt
from hoploom.build.importing.ogb import import_ogb

__all__ = ["from_dgl", "import_archive", "import_glt", "import_ogb"]
