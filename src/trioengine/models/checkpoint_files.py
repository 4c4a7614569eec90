"""The small JSON files of a checkpoint directory, read without any machine-learning library.

The layout is Hugging Face's: ``config.json``, ``generation_config.json``, ``tokenizer.json``,
``tokenizer_config.json`` and ``chat_template.jinja``. Both processes read it, the server for text
and the engine for the ids that end a sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "SPECIAL_TOKEN_NAMES",
    "eos_token_ids",
    "read_chat_templates",
    "read_json",
    "read_special_tokens",
]

SPECIAL_TOKEN_NAMES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in ``path``, empty if there is no such file.

    Raises:
        ConfigError: The file is not a JSON object, or cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def read_special_tokens(model_dir: Path) -> dict[str, str]:
    """Return the named special tokens (``bos_token`` …) of ``tokenizer_config.json`` as text.

    Older checkpoints keep them in ``special_tokens_map.json``, and write a token as an object.
    """
    named = read_json(model_dir / "special_tokens_map.json")
    named |= read_json(model_dir / "tokenizer_config.json")
    found: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        token = named.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Return the ids that end a sequence: ``generation_config.json``'s, else ``config.json``'s.

    The tokenizer's own end-of-sequence token counts too: chat models exist whose generation
    configuration still names the base model's.
    """
    ids = _ids(read_json(model_dir / "generation_config.json").get("eos_token_id"))
    if not ids:
        config = read_json(model_dir / "config.json")
        ids = _ids(config.get("eos_token_id"))
        ids = ids or _ids((config.get("text_config") or {}).get("eos_token_id"))
    own = _token_id(model_dir, read_special_tokens(model_dir).get("eos_token"))
    return tuple(dict.fromkeys([*ids, *own]))


def read_chat_templates(model_dir: Path) -> dict[str, str]:
    """Return the chat templates by name; most checkpoints have one, ``default``, or none.

    ``chat_template.jinja`` and ``additional_chat_templates/*.jinja`` win over
    ``tokenizer_config.json``, as in transformers.
    """
    templates = _inline_templates(read_json(model_dir / "tokenizer_config.json"))
    extra = sorted((model_dir / "additional_chat_templates").glob("*.jinja"))
    for name, path in [
        ("default", model_dir / "chat_template.jinja"),
        *((p.stem, p) for p in extra),
    ]:
        if path.is_file():
            templates[name] = path.read_text(encoding="utf-8")
    return templates


def _inline_templates(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    inline = tokenizer_config.get("chat_template")
    if isinstance(inline, str):
        return {"default": inline}
    if isinstance(inline, list):  # the older spelling of several: [{"name": …, "template": …}]
        return {str(entry["name"]): str(entry["template"]) for entry in inline}
    return {}


def _ids(value: object) -> list[int]:
    if isinstance(value, list):
        return [item for item in value if isinstance(item, int)]
    return [value] if isinstance(value, int) else []


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _token_id(model_dir: Path, token: str | None) -> list[int]:
    """Return the id of a special token; they are few, so the vocabulary is not even decoded."""
    if token is None:
        return []
    path = model_dir / "tokenizer.json"
    try:
        tokens = msgspec.json.decode(path.read_bytes(), type=_AddedTokens).added_tokens
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return [added.id for added in tokens if added.content == token]
