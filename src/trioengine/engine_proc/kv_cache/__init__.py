"""Blocks of the paged KV cache: who holds them, and which prefix they remember."""
