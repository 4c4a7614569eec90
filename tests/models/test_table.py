from __future__ import annotations

import re

from trioengine.config import ServerConfig
from trioengine.models.store import file_name
from trioengine.models.table import DEFAULT_MODEL, PACKAGED_MODELS


def test_entries_are_found_by_name() -> None:
    assert all(name == model.name for name, model in PACKAGED_MODELS.items())
    assert ServerConfig().model == DEFAULT_MODEL
    assert DEFAULT_MODEL in PACKAGED_MODELS


def test_entries_are_exact() -> None:
    for model in PACKAGED_MODELS.values():
        assert re.fullmatch(r"[0-9a-f]{64}", model.sha256)
        assert re.fullmatch(r"[\w.-]+==[\w.]+", model.requirement)
        assert model.name == file_name(model.name).lower()  # as users type it, and a file name
        assert model.is_gguf is not bool(model.companions)
        assert all(re.fullmatch(r"[0-9a-f]{64}", sha256) for _, sha256 in model.companions)
        assert model.num_bytes > 0
