"""Frequencies of rotary position embeddings, with the scalings that Llama-like models use.

All arithmetic is in float32 and in transformers' order, so that tables agree with its to the bit
wherever numpy's and torch's elementary functions do.

Source: Su et al. 2021, arXiv:2104.09864; YaRN, Peng et al. 2023, arXiv:2309.00071, section 3.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Float32Array = npt.NDArray[np.float32]

__all__ = ["RopeConfig", "UnsupportedRopeError"]

DEFAULT_THETA: Final = {"smollm3": 2_000_000.0}
TYPES: Final = frozenset({"default", "linear", "llama3", "yarn"})


class UnsupportedRopeError(ValueError):
    """The position embedding is of a kind that is not computed here."""


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary position embedding.

    Attributes:
        head_dim: Dimensions of a head, all of which rotate.
        theta: Base of the geometric series of wavelengths.
        kind: ``default``, ``linear``, ``llama3`` or ``yarn``.
        params: What the kind needs, as in ``rope_parameters``.
        max_positions: Of the model; some kinds fall back on it.
    """

    head_dim: int
    theta: float
    kind: str
    params: dict[str, Any]
    max_positions: int

    @classmethod
    def parse(cls, raw: dict[str, Any], head_dim: int) -> RopeConfig:
        """Read the old spelling (``rope_theta``, ``rope_scaling``) and the new one.

        Raises:
            UnsupportedRopeError: Another kind, or a part of the head does not rotate.
        """
        params = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
        if any(isinstance(value, dict) for value in params.values()):
            raise UnsupportedRopeError("layers of different position embeddings are not computed")
        kind = params.get("rope_type", params.get("type", "default"))
        if kind not in TYPES:
            raise UnsupportedRopeError(f"position embedding of type {kind!r} is not computed")
        partial = params.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
        if partial != 1.0:
            raise UnsupportedRopeError(f"only {partial:g} of each head rotates")
        default = DEFAULT_THETA.get(raw["model_type"], 10_000.0)
        theta = params.get("rope_theta", raw.get("rope_theta", default))
        config = cls(head_dim, float(theta), kind, params, int(raw["max_position_embeddings"]))
        config.frequencies()  # a missing or unusable parameter shows here
        return config

    def frequencies(self) -> tuple[Float32Array, float]:
        """Return radians per position, float32 ``[head_dim / 2]``, and the factor of cos and sin.

        Raises:
            UnsupportedRopeError: A parameter is missing or unusable.
        """
        try:
            return _KINDS[self.kind](self)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise UnsupportedRopeError(
                f"position embedding of type {self.kind!r}: bad or missing {error}"
            ) from error

    def tables(self, positions: int) -> tuple[Float32Array, Float32Array]:
        """Return cos and sin of every angle, float32 ``[positions, head_dim / 2]``."""
        frequencies, factor = self.frequencies()
        angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
        return np.cos(angles) * np.float32(factor), np.sin(angles) * np.float32(factor)


def _default(rope: RopeConfig) -> tuple[Float32Array, float]:
    return np.float32(1.0) / _base_powers(rope), 1.0


def _base_powers(rope: RopeConfig) -> Float32Array:
    exponents = np.arange(0, rope.head_dim, 2, dtype=np.float32) / np.float32(rope.head_dim)
    powers: Float32Array = np.power(np.float32(rope.theta), exponents)
    return powers


def _linear(rope: RopeConfig) -> tuple[Float32Array, float]:
    return _default(rope)[0] / np.float32(rope.params["factor"]), 1.0


def _llama3(rope: RopeConfig) -> tuple[Float32Array, float]:
    """Stretch long wavelengths by ``factor``, keep short ones, blend between."""
    factor = np.float32(rope.params["factor"])
    low, high = float(rope.params["low_freq_factor"]), float(rope.params["high_freq_factor"])
    original = rope.params.get("original_max_position_embeddings", rope.max_positions)
    base = _default(rope)[0]
    wavelengths = np.float32(2 * math.pi) / base
    stretched = np.where(wavelengths > original / low, base / factor, base)
    smooth = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * stretched / factor + smooth * stretched
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return np.where(between, blended, stretched).astype(np.float32), 1.0


def _yarn(rope: RopeConfig) -> tuple[Float32Array, float]:
    params = rope.params
    original = params.get("original_max_position_embeddings") or rope.max_positions
    factor = float(params.get("factor") or rope.max_positions / original)
    half = rope.head_dim // 2
    low, high = _yarn_range(rope, original)
    ramp = (np.arange(half, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    powers = _base_powers(rope)
    stretched = np.float32(1) / (np.float32(factor) * powers)
    frequencies = stretched * (np.float32(1) - keep) + (np.float32(1) / powers) * keep
    return frequencies.astype(np.float32), _yarn_attention_factor(params, factor)


def _yarn_range(rope: RopeConfig, original: float) -> tuple[float, float]:
    """Return the dimensions between which stretching sets in."""

    def dimension(rotations: float) -> float:
        ratio = original / (rotations * 2 * math.pi)
        return rope.head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low = dimension(rope.params.get("beta_fast") or 32)
    high = dimension(rope.params.get("beta_slow") or 1)
    if rope.params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_attention_factor(params: dict[str, Any], factor: float) -> float:
    given = params.get("attention_factor")
    if given is not None:
        return float(given)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(params["mscale"]) / mscale(params["mscale_all_dim"])
    return mscale(1.0)


_KINDS: Final = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
