"""The ranks of a run: how they start and meet, make calls together, compare their loaders, and end."""
