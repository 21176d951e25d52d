"""Ranks: who they are, where they meet, what they say to each other, and how they end."""
