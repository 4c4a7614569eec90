"""Where a ``ServerConfig`` comes from: flags > ``TRIOENGINE_*`` environment > TOML > defaults."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trioengine.config import ServerConfig
from trioengine.errors import ConfigError
from trioengine.option_values import is_blank
from trioengine.options import MODEL, OPTIONS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Mapping

    from trioengine.config import EngineOptions
    from trioengine.options import Option

__all__ = ["add_flags", "add_options", "load_config"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` every option's flag. Absent flags stay ``None``: other sources fill in."""
    add_flags(parser, OPTIONS)
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these options")


def add_flags(parser: argparse._ActionsContainer, options: Iterable[Option]) -> None:
    """Give ``parser``, or a group of one, the flags of these options."""
    import argparse

    for option in options:
        help_ = option.help + ("" if _unsaid(option.default) else f" (default: {option.default})")
        help_ = help_.replace("%", "%%")
        help_ = argparse.SUPPRESS if option.hidden else help_
        if option.kind == "switch":
            action = argparse.BooleanOptionalAction if option.default else "store_true"
            parser.add_argument(option.flag, action=action, default=None, help=help_)
        elif option.kind == "list":
            parser.add_argument(option.flag, action="append", metavar=option.unit, help=help_)
        else:
            metavar = option.unit or (
                "{" + ",".join(option.choices) + "}" if option.choices else None
            )
            parser.add_argument(option.flag, metavar=metavar, help=help_)


def load_config(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> ServerConfig:
    """Return the configuration that flags, environment and file add up to.

    Args:
        flags: What ``argparse`` found: ``model``, ``config`` and the options' destinations.
        environ: ``os.environ`` unless given.

    Raises:
        ConfigError: A value, a key or the file is unusable; one sentence that names its source.
    """
    environ = os.environ if environ is None else environ
    file = _read_file(_config_path(flags, environ))
    engine: dict[str, object] = {}
    server: dict[str, object] = {}
    for option in OPTIONS:
        for raw, source in _sources(option, flags, environ, file):
            owner, _, field = option.field.rpartition(".")
            (engine if owner else server)[field] = option.read(raw, source)
            break
    for raw, source in _sources(MODEL, flags, environ, file):
        server["model"] = MODEL.read(raw, source)
        break
    config = msgspec.convert({**server, "engine": engine}, ServerConfig)
    if (config.ssl_certfile is None) != (config.ssl_keyfile is None):
        raise ConfigError("--ssl-certfile and --ssl-keyfile need each other")
    if config.engine.kv_cache_memory_gib is not None and config.engine.kv_cache_share is not None:
        raise ConfigError("--kv-cache-memory and --kv-cache-share exclude each other")
    if config.on_stall == "restart" and not config.engine_restarts:
        raise ConfigError("--on-stall restart needs --engine-restarts, of at least 1")
    if config.replay and not config.engine_restarts:
        raise ConfigError("--replay needs --engine-restarts, of at least 1")
    _check_quantization(config.engine)
    return config


def _check_quantization(engine: EngineOptions) -> None:
    """Refuse at once what no engine that these options could mean would do."""
    if engine.quantization in {"auto", "none"}:
        return
    if engine.backend not in {"auto", "native"}:
        other = f"--engine {engine.backend}"
    elif engine.device == "cuda":
        other = "--device cuda"
    else:
        return
    raise ConfigError(
        f"--quantization {engine.quantization} is the native engine's, on the CPU: not with {other}"
    )


def _sources(
    option: Option, flags: Mapping[str, Any], environ: Mapping[str, str], file: Mapping[str, Any]
) -> Iterator[tuple[object, str]]:
    flag = flags.get(option.name.replace("-", "_"))
    if flag is not None:
        yield flag, "MODEL" if option is MODEL else option.flag
    if not is_blank(environ.get(option.variable, "")):  # set to nothing is how many say unset
        yield environ[option.variable], option.variable
    if option.name in file:
        yield file[option.name], f"{option.name} in the configuration file"


def _config_path(flags: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    flag = flags.get("config")
    if is_blank(flag):
        raise ConfigError("--config: must not be empty")
    return flag or environ.get("TRIOENGINE_CONFIG") or None


def _read_file(path: str | None) -> dict[str, Any]:
    """Return the options of a TOML file, their names with dashes; nothing without a file."""
    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = {key.replace("_", "-"): value for key, value in tomllib.loads(text).items()}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    known = {option.name for option in OPTIONS} | {"model"}
    if unknown := sorted(found.keys() - known):
        raise ConfigError(f"--config {path}: unknown option {unknown[0]!r}")
    return found


def _unsaid(default: object) -> bool:
    return default is None or default is False or default in ("", (), {})
