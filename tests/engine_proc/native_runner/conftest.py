"""Fixtures of the native runner's tests."""

from helpers.native_fixtures import extension, isa, open_tiny

__all__ = ["extension", "isa", "open_tiny"]
