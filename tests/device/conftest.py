"""Fixtures of tests that need a GPU."""

from helpers.torch_fixtures import checkpoints, open_runner

__all__ = ["checkpoints", "open_runner"]
