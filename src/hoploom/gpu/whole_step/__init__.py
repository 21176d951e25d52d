"""Whole steps: sampling, gathering and learning are recorded once and replayed."""
