"""What tests share: graphs, servers, reference implementations, and what their child processes run."""

from pathlib import Path

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
