"""Answers of a given shape: specifications compiled beside the step loop, masks for its rows."""
