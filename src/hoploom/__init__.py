"""Hoploom."""
