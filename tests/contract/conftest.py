"""Fixtures of the runners' tests."""

from helpers.native_fixtures import extension, open_tiny
from helpers.torch_fixtures import checkpoints, open_runner

__all__ = ["checkpoints", "extension", "open_runner", "open_tiny"]
