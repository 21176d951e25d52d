"""The table of every key of graph.toml, in Markdown, for the documentation."""

from hoploom.config.keys import REQUIRED, default_of, key_of, keys_in
from hoploom.config.text import as_toml
from hoploom.ingest.tables.recipe import ColumnRule, EdgeTable, GraphSection, NodeTable

OWNERS = {
    "graph": GraphSection,
    "nodes.<type>": NodeTable,
    'edges."<source> <name> <destination>"': EdgeTable,
    "….columns.<column>": ColumnRule,
}


def reference() -> str:
    """A heading line per section, then its keys."""
    lines = []
    for section, owner in OWNERS.items():
        lines += ["", f"`[{section}]`", "", "| Key | Default | Takes | What it says |", "|---|---|---|---|"]
        for name, described in keys_in(owner).items():
            key, default = key_of(described), default_of(described)
            shown = "required" if default is REQUIRED else "" if default in (None, (), {}) else f"`{as_toml(default)}`"
            lines.append(f"| `{name}` | {shown} | {key.rule.expects} | {key.help} |")
    return "\n".join(lines) + "\n"
