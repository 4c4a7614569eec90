"""Where a configuration comes from, and how it refuses what it cannot use."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import pytest

from trioengine.config import EngineOptions, ServerConfig
from trioengine.errors import ConfigError
from trioengine.options import OPTIONS, Option
from trioengine.settings import add_options, load_config

if TYPE_CHECKING:
    from pathlib import Path


def load(*arguments: str, environ: dict[str, str] | None = None) -> ServerConfig:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    add_options(parser)
    return load_config(vars(parser.parse_args(arguments)), environ or {})


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "trioengine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_without_any_source_everything_is_the_default() -> None:
    assert load() == ServerConfig()


def test_flags_beat_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = toml(tmp_path, "port = 1\nmax-queue = 2\ndrain-timeout = 3\n")
    environ = {"TRIOENGINE_PORT": "11", "TRIOENGINE_MAX_QUEUE": "12"}
    config = load("--port", "21", "--config", file, environ=environ)
    assert (config.port, config.max_queue_sequences, config.drain_timeout_s) == (21, 12, 3.0)
    assert config.death_grace_s == ServerConfig().death_grace_s


def test_the_file_may_be_named_in_the_environment(tmp_path: Path) -> None:
    file = toml(tmp_path, 'model = "here"\nenable_prefix_caching = false\napi_key = ["a", "b"]\n')
    config = load(environ={"TRIOENGINE_CONFIG": file})
    assert config.model == "here"
    assert config.engine.enable_prefix_caching is False
    assert config.api_keys == ("a", "b")


def test_the_model_follows_the_same_order(tmp_path: Path) -> None:
    file = toml(tmp_path, 'model = "file"')
    assert load("--config", file).model == "file"
    assert load("--config", file, environ={"TRIOENGINE_MODEL": "env"}).model == "env"
    assert load("flag", "--config", file, environ={"TRIOENGINE_MODEL": "env"}).model == "flag"


def test_every_kind_of_option_has_a_flag() -> None:
    config = load(
        *("--api-key", "k1", "--api-key", "k2,not-split", "--engine", "sim", "--seed", "-3"),
        *("--engine-args", '{"step_s": 0.5, "words": true}', "--no-enable-prefix-caching"),
        *("--enable-admin", "--kv-cache-memory", "1.5", "--chat-template", "{{ messages }}"),
    )
    assert config == ServerConfig(
        api_keys=("k1", "k2,not-split"),
        enable_admin=True,
        chat_template="{{ messages }}",
        engine=EngineOptions(
            backend="sim",
            seed=-3,
            engine_args={"step_s": 0.5, "words": True},
            enable_prefix_caching=False,
            kv_cache_memory_gib=1.5,
        ),
    )


def test_lists_are_separated_by_commas_in_the_environment() -> None:
    config = load(environ={"TRIOENGINE_API_KEY": "a, b", "TRIOENGINE_SERVED_MODEL_NAME": "x"})
    assert config.api_keys == ("a", "b")
    assert config.served_model_names == ("x",)


def test_an_empty_key_in_the_environment_is_no_key() -> None:
    assert load(environ={"TRIOENGINE_API_KEY": ""}).api_keys == ()


def test_switches_in_the_environment() -> None:
    assert load(environ={"TRIOENGINE_ENABLE_ADMIN": "Yes"}).enable_admin
    assert not load(environ={"TRIOENGINE_ENABLE_PREFIX_CACHING": "0"}).engine.enable_prefix_caching


def test_a_chat_template_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ bos }}", encoding="utf-8")
    assert load("--chat-template", str(path)).chat_template == "{{ bos }}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "x"), "--port: must be a whole number, got 'x'"),
        (("--port", "70000"), "--port: must be in [0, 65535], got 70000"),
        (("--max-queue", "0"), "--max-queue: must be >= 1, got 0"),
        (("--drain-timeout", "nan"), "--drain-timeout: must be >= 0, got nan"),
        (("--drain-timeout", "inf"), "--drain-timeout: must be >= 0, got inf"),
        (("--engine", "gpu"), "--engine: must be one of auto, native, torch, sim, got 'gpu'"),
        (("--engine-args", "[1]"), "--engine-args: Expected `object`, got `array`"),
        (("--chat-template", "/does/not/exist"), "--chat-template: [Errno 2] No such file"),
        (("--chat-template", "{% if %}"), "--chat-template: the chat template does not compile"),
        (("--ssl-certfile", "a"), "--ssl-certfile and --ssl-keyfile need each other"),
        (
            ("--kv-cache-memory", "1", "--kv-cache-share", "0.5"),
            "--kv-cache-memory and --kv-cache-share exclude each other",
        ),
        (("--kv-cache-share", "1.5"), "--kv-cache-share: must be in [0.001, 1], got 1.5"),
        (("--config", "/does/not/exist"), "--config /does/not/exist: [Errno 2]"),
        (
            ("--quantization", "q3"),
            "--quantization: must be one of auto, none, int8, q4, gguf, got 'q3'",
        ),
        (
            ("--quantization", "int8", "--engine", "torch"),
            "--quantization int8 is the native engine's, on the CPU: not with --engine torch",
        ),
        (
            ("--quantization", "gguf", "--engine", "sim"),
            "--quantization gguf is the native engine's, on the CPU: not with --engine sim",
        ),
        (
            ("--quantization", "q4", "--device", "cuda"),
            "--quantization q4 is the native engine's, on the CPU: not with --device cuda",
        ),
        (("--seed", str(2**63)), "--seed: must be in [-9.22337e+18, 9.22337e+18], got"),
        (("--threads", "100000"), "--threads: must be in [1, 1024], got 100000"),
        (("--stall-timeout", "0"), "--stall-timeout: must be >= 0.001, got 0"),
        (("--request-timeout", "0"), "--request-timeout: must be >= 0.001, got 0"),
    ],
)
def test_a_bad_flag_is_one_clear_sentence(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    assert caught.value.message.startswith(message)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("flag", [option.flag for option in OPTIONS if option.kind != "switch"])
def test_a_flag_that_says_nothing_is_refused(flag: str) -> None:
    """``--api-key "$UNSET"`` must not serve without a key, nor ``--host "$UNSET"`` everywhere."""
    if flag == "--root-path":
        assert load(flag, "").root_path == ""
        return
    for empty in ("", " "):
        with pytest.raises(ConfigError, match=f"^{flag}: must "):
            load(flag, empty)


def test_an_empty_model_is_not_the_default_model() -> None:
    with pytest.raises(ConfigError, match=r"^MODEL: must not be empty$"):
        load("")
    with pytest.raises(ConfigError, match=r"^--config: must not be empty$"):
        load("--config", "")


@pytest.mark.parametrize("keys", ["k1,", ",k1", "k1,,k2", "k1, ,k2"])
def test_a_list_has_no_empty_entries(keys: str) -> None:
    with pytest.raises(ConfigError, match=r"^TRIOENGINE_API_KEY: must not have empty entries"):
        load(environ={"TRIOENGINE_API_KEY": keys})
    with pytest.raises(ConfigError, match=r"^--api-key: must not have empty entries"):
        load("--api-key", "k1", "--api-key", "")


def test_an_empty_variable_is_as_good_as_none() -> None:
    environ = {option.variable: "" for option in OPTIONS}
    assert load(environ=environ | {"TRIOENGINE_MODEL": "", "TRIOENGINE_CONFIG": ""}) == load()


def test_a_bad_variable_names_itself() -> None:
    with pytest.raises(ConfigError, match=r"^TRIOENGINE_PORT: must be a whole number, got '80a'$"):
        load(environ={"TRIOENGINE_PORT": "80a"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "unknown option 'prot'"),
        ("port = true", "port in the configuration file: must be a whole number, got True"),
        ("port = 1.5", "port in the configuration file: must be a whole number, got 1.5"),
        ("host = 1", "host in the configuration file: must be text, got 1"),
        ("api-key = 1", "api-key in the configuration file: must be a list of texts, got 1"),
        ("port =", "Invalid value"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("--config", toml(tmp_path, text))
    assert message in caught.value.message


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: str(option.name))
def test_every_option_names_a_real_field(option: Option) -> None:
    """A default of ``None`` is one that the engine chooses, which the help must say itself."""
    assert option.default is not None or option.kind != "switch"
    owner, _, field = option.field.rpartition(".")
    kinds: Any = EngineOptions if owner else ServerConfig
    assert field in kinds.__struct_fields__


def test_every_field_has_an_option() -> None:
    fields = {*ServerConfig.__struct_fields__} - {"model", "engine"}
    fields |= {f"engine.{field}" for field in EngineOptions.__struct_fields__}
    assert fields == {option.field for option in OPTIONS}


def test_help_tells_defaults_and_units() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    help_ = " ".join(parser.format_help().split())
    assert "--drain-timeout SECONDS" in help_
    assert "(default: 30.0)" in help_
