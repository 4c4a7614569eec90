"""Chat templates: a conversation to the text that a model was trained on.

A template is a jinja2 program that comes with the model. It runs in the sandbox, with the same
extensions, filters and globals as in transformers, so that the text is the same; and with bounds on
its output and time, since what it makes of a client's messages is nobody's promise.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import string
import time
from collections.abc import Sized
from typing import TYPE_CHECKING, Any, Final

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils
import markupsafe
from jinja2.exceptions import SecurityError

from trioengine.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jinja2.parser import Parser

__all__ = ["MAX_RENDERED_CHARS", "MAX_RENDER_SECONDS", "ChatTemplate"]

MAX_RENDERED_CHARS: Final = 32 * 2**20  # twice the default of --max-body-bytes
MAX_RENDER_SECONDS: Final = 10.0

# Stands at the end of a message that is to be continued; as in transformers, whose trailing space
# tells whether the template trims.
_HERE: Final = "CONTINUE_FINAL_MESSAGE_TAG "

_REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """One compiled template. Rendering is safe from several threads at once.

    Raises:
        ConfigError: The source does not compile; says where.
    """

    def __init__(self, source: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template does not compile: line {error.lineno}: {error.message}"
            ) from error
        self._clock = clock

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        continue_final: bool = False,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: As OpenAI has them. A key whose value is null counts as absent, and reasoning
                is found under each of the names that templates know it by.
            variables: What else the template sees; ``tools`` and ``documents`` are ``None`` unless
                given.
            continue_final: End within the last message, so that the model goes on with it.

        Raises:
            InvalidRequestError: The template refuses these messages, fails on them, or makes too
                much of them. ``param`` is ``messages``.
        """
        visible = {"tools": None, "documents": None, **variables}
        visible["messages"] = [_normalized(message) for message in messages]
        if continue_final:
            _mark_end(visible["messages"])
        try:
            text = self._bounded(visible)
            return _up_to_here(text) if continue_final else text
        except InvalidRequestError:
            raise
        except jinja2.TemplateError as error:
            raise _refusal(error.message or type(error).__name__) from error
        except Exception as error:  # an expression of the template's over the client's values
            raise _refusal(f"the chat template fails on them: {error}") from error

    def _bounded(self, variables: Mapping[str, Any]) -> str:
        deadline = self._clock() + MAX_RENDER_SECONDS
        pieces, length = [], 0
        for piece in self._template.generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_RENDERED_CHARS:
                raise _refusal(f"they render to more than {MAX_RENDERED_CHARS} characters")
            if self._clock() > deadline:
                raise _refusal(f"they take more than {MAX_RENDER_SECONDS:g} s to render")
        return "".join(pieces)


def _mark_end(messages: list[dict[str, Any]]) -> None:
    content = messages[-1].get("content", "") if messages else None
    if not isinstance(content, str):
        raise _refusal("there is no text at their end that could be continued")
    messages[-1]["content"] = content + _HERE


def _up_to_here(text: str) -> str:
    mark = _HERE.strip()
    if mark not in text:
        raise _refusal("the chat template leaves out the last of them, which is to be continued")
    at = text.rindex(mark)
    kept_space = text.startswith(_HERE, at)
    return text[:at] if kept_space else text[:at].rstrip()


def _refusal(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"messages cannot be used: {reason}", param="messages")


def _normalized(message: Mapping[str, Any]) -> dict[str, Any]:
    """Do to a message what transformers does before a template sees it."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[key] for key in _REASONING_KEYS if key in kept), None)
    if reasoning is None:
        return kept
    return {"thinking": reasoning, **kept, "reasoning_content": reasoning}


# What a template can call -------------------------------------------------------------------------


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    del environment.globals["lipsum"]  # text without end, by a function whose globals are at hand
    for name in ("center", "indent"):
        environment.filters[name] = _modest(environment.filters[name])
    environment.filters["format"] = _modest_format
    return environment


_WIDE_FORMAT: Final = re.compile(r"[%:.][^\s\d{}%]{0,3}\d{7}")  # a width or precision of 7 digits
_WIDE_FIELD: Final = re.compile(r"\d{7}")
_TOO_MUCH_ROOM: Final = "the chat template asks for too much room"
_WIDENERS: Final = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Refuses, besides, the operators that make much out of little before we see any of it."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call(
        __self,  # as in jinja2: the template's own keywords may be called `self`
        __context: jinja2.runtime.Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if getattr(__obj, "__name__", None) in _WIDENERS:
            _check_modest(None, *args, *kwargs.values())
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return ``str.format`` or ``str.format_map`` with a sandboxed formatter, as jinja2 does.

        Only its formatter is another: what a field's width comes from is known there alone.
        """
        if super().wrap_str_format(value) is None:
            return None
        pattern, by_map = value.__self__, value.__name__ == "format_map"
        escapes = isinstance(pattern, markupsafe.Markup)
        formatter = _EscapeFormatter(self, escape=pattern.escape) if escapes else _Formatter(self)

        @functools.wraps(value)
        def format_(*args: Any, **kwargs: Any) -> str:
            if by_map:
                (kwargs,), args = args, ()
            text: str = type(pattern)(formatter.vformat(pattern, args, kwargs))
            return text

        return format_

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "%":
            if isinstance(left, str):
                _check_widths(left, right if isinstance(right, tuple) else (right,))
            return super().call_binop(context, operator, left, right)
        for value, count in ((left, right), (right, left)):
            if isinstance(count, int) and _size(value, operator) * count > MAX_RENDERED_CHARS:
                raise SecurityError(f"the chat template uses {operator} on too much")
        return super().call_binop(context, operator, left, right)


def _check_widths(pattern: str, values: Sequence[object]) -> None:
    """Raise where ``pattern % values`` is so wide; ``*`` takes a width from among the values."""
    _check_modest(pattern, *(values if "*" in pattern else ()))


class _ModestFields(string.Formatter):
    """Refuses fields that are too wide."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        if _WIDE_FIELD.search(format_spec):
            raise SecurityError(_TOO_MUCH_ROOM)
        return super().format_field(value, format_spec)


class _Formatter(_ModestFields, jinja2.sandbox.SandboxedFormatter):
    pass


class _EscapeFormatter(_ModestFields, jinja2.sandbox.SandboxedEscapeFormatter):
    pass


def _check_modest(pattern: object, *values: object) -> None:
    """Raise where so wide a result is asked for, by number or format, that it fills the memory."""
    if isinstance(pattern, str) and _WIDE_FORMAT.search(pattern):
        raise SecurityError(_TOO_MUCH_ROOM)
    for value in values:
        if isinstance(value, int) and value > MAX_RENDERED_CHARS:
            raise SecurityError(_TOO_MUCH_ROOM)


def _modest(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that refuses what ``_check_modest`` does."""

    @functools.wraps(apply)
    def modest(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_modest(None, *args, *kwargs.values())
        return apply(value, *args, **kwargs)

    return modest


def _modest_format(value: Any, *args: Any, **kwargs: Any) -> str:
    _check_widths(str(value), args)
    return str(jinja2.filters.do_format(value, *args, **kwargs))


def _size(value: object, operator: str) -> int:
    """Return how much one more factor, or power, of ``value`` adds to a result."""
    if isinstance(value, int):
        return value.bit_length() if operator == "**" else 0
    return len(value) if isinstance(value, Sized) else 0


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's part for training: no-op."""

    tags: Final = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # the name that templates may use
    return datetime.datetime.now().strftime(format)


class _Dict:
    """``dict`` without the attributes of a type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that cannot hold attributes which would reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as in jinja2: `self` is a usable name
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template cannot store the attribute {name!r}")
