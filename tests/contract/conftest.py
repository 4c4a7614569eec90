"""Fixtures of the torch runner's tests."""

from helpers.torch_fixtures import checkpoints, open_runner

__all__ = ["checkpoints", "open_runner"]
