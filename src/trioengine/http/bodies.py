"""A request body's bytes → a checked struct, or a 400 that names what is wrong. Pure.

msgspec reports where a value did not fit as a path (``$.messages[0].role``); clients get it as
``param``. JSON numbers that are no finite number, and text that is no UTF-8, do not pass.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from trioengine.errors import InvalidRequestError
from trioengine.http.large_bodies import LARGE_BYTES, FieldError, LargeBodyDecoder, check_names
from trioengine.http.malformed import find_culprit
from trioengine.http.schemas import IGNORED, NOT_SAID, UNSUPPORTED
from trioengine.http.whole_numbers import WholeNumberDecoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from msgspec import Raw

__all__ = ["BodyDecoder"]

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=msgspec.Struct)

_FRACTION: Final = "got `float`"
_BOM: Final = b"\xef\xbb\xbf"
_PATH: Final = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_MISSING: Final = re.compile(r"missing required field `([^`]+)`")
_MAX_NAMES_LOGGED: Final = 1000
_NOOP_BYTES: Final = 64  # no value that changes nothing is longer than this


class BodyDecoder(Generic[Body]):
    """Decodes the bodies of one endpoint.

    Args:
        body_type: What they are.
        unsupported: Values of undecoded fields that change nothing; any other is refused.
    """

    def __init__(
        self, body_type: type[Body], unsupported: Mapping[str, tuple[Any, ...]] = UNSUPPORTED
    ) -> None:
        self._type = body_type
        self._decoder = msgspec.json.Decoder(body_type)
        self._names = frozenset(body_type.__struct_fields__)
        self._unsupported = {
            name: noops for name, noops in unsupported.items() if name in self._names
        }
        self._seen: set[str] = set()

    def decode(self, data: bytes) -> Body:
        """Return the body.

        Raises:
            InvalidRequestError: It is no JSON object of this shape, or asks for a parameter that
                we know and cannot honour.
        """
        data = data.removeprefix(_BOM)
        _check_utf8(data)
        if large := len(data) > LARGE_BYTES:
            check_names(data)
        try:
            try:
                body = self._large.decode(data) if large else self._decoder.decode(data)
            except (FieldError, msgspec.ValidationError) as error:
                if _FRACTION not in str(error):
                    raise
                body = self._whole.decode(data)
        except FieldError as error:
            raise _wrong_value(str(error), error.field) from None
        except msgspec.ValidationError as error:
            raise _wrong_value(str(error)) from None
        except msgspec.DecodeError as error:
            raise _malformed(data, error) from None
        except RecursionError:
            raise InvalidRequestError("The request's body is nested too deeply.") from None
        self._refuse_unsupported(body)
        if logger.isEnabledFor(logging.DEBUG):
            self._note_unknown(data)
        return body

    @functools.cached_property
    def _large(self) -> LargeBodyDecoder[Body]:
        return LargeBodyDecoder(self._type)

    @functools.cached_property
    def _whole(self) -> WholeNumberDecoder[Body]:
        return WholeNumberDecoder(self._type)

    def _refuse_unsupported(self, body: Body) -> None:
        for name, noops in self._unsupported.items():
            raw = getattr(body, name)
            if raw is not NOT_SAID and not _changes_nothing(raw, noops):
                raise InvalidRequestError(
                    f"'{name}' with this value is not supported by this server.", param=name
                )

    def _note_unknown(self, data: bytes) -> None:
        names = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        for name in names.keys() - self._names - IGNORED - self._seen:
            if len(self._seen) < _MAX_NAMES_LOGGED:
                self._seen.add(name)
                logger.debug("unknown field %.100r is ignored in %s", name, self._type.__name__)


def _check_utf8(data: bytes) -> None:
    if data.isascii():
        return
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"The request's body is not UTF-8: {error.reason} at byte {error.start}."
        ) from None


def _malformed(data: bytes, error: msgspec.DecodeError) -> InvalidRequestError:
    found = find_culprit(data)
    if found is None:
        return InvalidRequestError(f"The request's body is not valid JSON: {error}")
    param = found.param.encode("utf-8", "replace").decode()
    return InvalidRequestError(f"Invalid value for '{param}': {found.reason}.", param=param)


def _wrong_value(message: str, field: str = "") -> InvalidRequestError:
    """Turn msgspec's sentence into ours, with the path, within ``field`` if any, as ``param``."""
    path = _PATH.search(message)
    param = field + (path[1].replace("[...]", "") if path else "")
    reason = _PATH.sub("", message)
    if missing := _MISSING.search(reason):
        param = f"{param}.{missing[1]}".removeprefix(".")
        return InvalidRequestError(f"'{param}' is required.", param=param)
    if not param:
        return InvalidRequestError("The request's body must be a JSON object.")
    return InvalidRequestError(f"Invalid value for '{param}': {reason}.", param=param)


def _changes_nothing(raw: Raw, noops: tuple[Any, ...]) -> bool:
    text = bytes(raw)
    if len(text) > _NOOP_BYTES:
        return False
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return False
    if value is None:
        return True
    # 0 == False in Python, but not in JSON.
    return any(
        value == noop and isinstance(value, bool) is isinstance(noop, bool) for noop in noops
    )
