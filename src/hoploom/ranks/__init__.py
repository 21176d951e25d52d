"""The ranks of a run: their environment, rendezvous, shared calls, agreement on loaders, errors and end."""
