"""Cutting a store into parts: which node goes where, what that costs, and writing it."""

from hoploom.partition.assign import METHODS, assign, edge_cut
from hoploom.partition.partition import partition
from hoploom.partition.picture import as_svg
from hoploom.partition.report import PartitionReport, as_json, report

__all__ = ["METHODS", "PartitionReport", "as_json", "as_svg", "assign", "edge_cut", "partition", "report"]
