"""``1.0`` where an integer is expected: how clients in languages without integers say 1. Pure.

OpenAI's own API and vLLM take it. msgspec does so only together with strings for numbers and other
kindnesses, so a body that was refused because of it is decoded once more, into a type that takes
fractions; what is whole becomes an integer there, and nothing else is more welcome than before.
"""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import NODEFAULT

from trioengine.http.large_bodies import LARGE_BYTES, LargeBodyDecoder

__all__ = ["WholeNumberDecoder"]

Body = TypeVar("Body", bound=msgspec.Struct)

_LOOSE: Final[tuple[tuple[Any, Any], ...]] = (
    (int, int | float),
    (int | None, int | float | None),
    (list[int], list[int | float]),
    (list[int] | None, list[int | float] | None),
)


class WholeNumberDecoder(Generic[Body]):
    """Decodes bodies of one type."""

    def __init__(self, body_type: type[Body]) -> None:
        self._type = body_type
        fields = msgspec.structs.fields(body_type)
        loosened = {
            field.name: kind for field in fields for strict, kind in _LOOSE if field.type == strict
        }
        loose_type = msgspec.defstruct(
            f"Loose{body_type.__name__}",
            [_field(field, loosened.get(field.name, field.type)) for field in fields],
            kw_only=True,
        )
        self._names = [field.name for field in fields]
        self._loosened = loosened.keys()
        self._decode = msgspec.json.Decoder(loose_type).decode
        self._decode_large = LargeBodyDecoder(loose_type).decode

    def decode(self, data: bytes) -> Body:
        """Return the body.

        Raises:
            InvalidRequestError: As of ``LargeBodyDecoder``.
            FieldError: As of ``LargeBodyDecoder``.
            msgspec.DecodeError: As of any decoder; also where a number that has to be is not whole.
        """
        loose = (self._decode_large if len(data) > LARGE_BYTES else self._decode)(data)
        values = {name: getattr(loose, name) for name in self._names}
        for name in self._loosened:
            values[name] = _whole(values[name], name)
        return self._type(**values)


def _field(field: msgspec.structs.FieldInfo, kind: Any) -> Any:
    return (field.name, kind) if field.default is NODEFAULT else (field.name, kind, field.default)


def _whole(value: Any, path: str) -> Any:
    """Return a number, each of a list, as an integer; complain of others as msgspec does."""
    if isinstance(value, list):
        return [_whole(item, f"{path}[{number}]") for number, item in enumerate(value)]
    if not isinstance(value, float):
        return value
    if not value.is_integer():
        raise msgspec.ValidationError(f"Expected `int`, got `float` - at `$.{path}`")
    return int(value)
