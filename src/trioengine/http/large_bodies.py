"""Decoding a large body without building what is going to be refused. Pure.

Sixteen megabytes of small numbers take longer to become objects than any stream may wait. So where
a body is large, its lists are left undecoded until their size has been looked at: a list that can
be within its bounds takes a few milliseconds. So does everything that happens here in one go: none
of it lets go of the interpreter, so that a thread alone would not help those who wait for it.
"""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import NODEFAULT, Raw

from trioengine.errors import InvalidRequestError
from trioengine.http.messages import MAX_MESSAGES

__all__ = ["LARGE_BYTES", "MAX_NAMES", "FieldError", "LargeBodyDecoder", "check_names"]

Body = TypeVar("Body", bound=msgspec.Struct)

LARGE_BYTES: Final = 256 * 2**10

MAX_NAMES: Final = 2**18
"""Of objects. An unknown one is compared with every field: 16 MiB of them took 120 ms."""

# Field -> bytes of JSON, generously: what is longer breaks the limits of the field's values.
_MAX_BYTES: Final = {
    "stop": 64 * 2**10,
    "stop_token_ids": 64 * 2**10,
    "logit_bias": 128 * 2**10,
    "bad_words": 512 * 2**10,
    "tools": 1024 * 2**10,
    "metadata": 64 * 2**10,
}
# Field -> what each of its entries has, and how many there may be. Within a string the quotes would
# be escaped, so that counting needs no decoding.
_MAX_MARKS: Final = {
    "messages": ((b'"role"', MAX_MESSAGES), (b'"type"', MAX_MESSAGES)),
    "input": ((b'"role"', MAX_MESSAGES), (b'"type"', 2 * MAX_MESSAGES)),
    "allowed_token_ids": ((b",", 2**18),),  # the largest vocabulary of note
}


def check_names(data: bytes) -> None:
    """Refuse a body with more members of objects than any request needs.

    What is text has colons too, so those alone say only that there cannot be too many. Otherwise
    the ends of names are counted. Within a text the quote is escaped; where a text spells JSON that
    spells JSON, its names may be taken for ours.

    Raises:
        InvalidRequestError: There are more than ``MAX_NAMES``.
    """
    if data.count(b":") <= MAX_NAMES:
        return
    plain = data.translate(None, b" \t\r\n")
    in_text = plain.count(b'\\":') - plain.count(b'\\\\":')
    if plain.count(b'":') - in_text > MAX_NAMES:
        raise InvalidRequestError(
            f"The objects of the request's body have more than {MAX_NAMES} members."
        )


class FieldError(Exception):
    """msgspec's complaint about the value of one field; its path begins at that value."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class LargeBodyDecoder(Generic[Body]):
    """Decodes bodies of one type."""

    def __init__(self, body_type: type[Body]) -> None:
        self._type = body_type
        fields = msgspec.structs.fields(body_type)
        bounded = _MAX_BYTES.keys() | _MAX_MARKS.keys()
        self._decoders = {
            field.name: msgspec.json.Decoder(field.type)
            for field in fields
            if field.name in bounded and field.type is not Raw
        }
        self._names = [field.name for field in fields]
        outline = msgspec.defstruct(
            f"{body_type.__name__}Outline",
            [self._outlined(field) for field in fields],
            kw_only=True,
        )
        self._decode = msgspec.json.Decoder(outline).decode

    def decode(self, data: bytes) -> Body:
        """Return the body.

        Raises:
            InvalidRequestError: A list is too long to be within its limits.
            FieldError: A list is not of the right type.
            msgspec.DecodeError: As of any decoder.
        """
        outline = self._decode(data)
        values = {name: getattr(outline, name) for name in self._names}
        for name, decoder in self._decoders.items():
            raw = values[name]
            if isinstance(raw, Raw):
                values[name] = _decoded(name, raw, decoder)
        return self._type(**values)

    def _outlined(self, field: msgspec.structs.FieldInfo) -> Any:
        kind = Raw if field.name in self._decoders else field.type
        if field.default is not NODEFAULT:
            return field.name, kind, field.default
        return field.name, kind


def _decoded(name: str, raw: Raw, decoder: msgspec.json.Decoder[Any]) -> Any:
    data = bytes(raw)
    marks = _MAX_MARKS.get(name, ())
    if len(data) > _MAX_BYTES.get(name, len(data)) or any(data.count(m) > n for m, n in marks):
        raise InvalidRequestError(f"'{name}' has far more entries than it takes.", param=name)
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise FieldError(name, str(error)) from error
