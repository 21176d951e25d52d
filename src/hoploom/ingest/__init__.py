"""Graphs from tables, archives, other tools' folders and generators as stores."""
