"""Text to token ids and back, and conversations to text, for the server process.

Over the ``tokenizers`` library alone: importing transformers would cost every start two seconds.

Threads: one ``Tokenizer`` serves any number of them. "Already borrowed", an error that servers of
this kind are known for, comes of a setter (of truncation or padding) that meets a reader in another
thread. Here the library's object is private, its setters are called once, before it is shared, and
whatever is called later only reads. A copy for each thread was refused: it costs 0.1 s with the GIL
held, and 30 MB, on each thread's first request.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from trioengine.errors import ConfigError, InvalidRequestError
from trioengine.models import checkpoint_files
from trioengine.text import long_text
from trioengine.text.chat_template import ChatTemplate
from trioengine.text.vocabulary import SIMULATED_EOS_ID, Vocabulary, simulated_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Tokenizer"]

# The library's pool of threads does nothing for one text, and warns at each fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_TOOL_USE: Final = "tool_use"  # the template that checkpoints with several keep for tools


class Tokenizer:
    """One model's tokenizer and chat templates. Safe to share between threads.

    Attributes:
        vocab_size: Token ids are in [0, vocab_size). The model itself may have more rows.
        eos_token_ids: Ids that end a sequence.
        bos_token_id: Id that begins a text, if the model has one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: tuple[int, ...] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()  # a checkpoint can carry settings that would lose tokens
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._templates = dict(chat_templates or {})
        self._compiled = functools.cache(ChatTemplate)
        self.vocab_size = backend.get_vocab_size()
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = backend.token_to_id(self._special_tokens.get("bos_token", ""))

    @classmethod
    def from_dir(cls, model_dir: Path, *, chat_template: str | None = None) -> Tokenizer:
        """Read a checkpoint's tokenizer.

        Args:
            model_dir: Directory in Hugging Face layout.
            chat_template: The path of a template, or a template itself, instead of the model's.

        Raises:
            ConfigError: Files are missing or unusable.
        """
        path = model_dir / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} cannot be read: {error}") from error
        templates = checkpoint_files.read_chat_templates(model_dir)
        if chat_template is not None:
            templates = {"default": _given_template(chat_template)}
        return cls(
            backend,
            eos_token_ids=checkpoint_files.eos_token_ids(model_dir),
            special_tokens=checkpoint_files.read_special_tokens(model_dir),
            chat_templates=templates,
        )

    @classmethod
    def simulated(cls, vocab_size: int, *, chat_template: str | None = None) -> Tokenizer:
        """Return the tokenizer of the simulated engine, which needs no files.

        Args:
            vocab_size: At least the 256 bytes and one that ends a sequence.
            chat_template: As of ``from_dir``.

        Raises:
            ConfigError: The template cannot be used.
            ValueError: ``vocab_size`` leaves no room for the 256 bytes.
        """
        tokens = simulated_tokens(vocab_size)
        vocab = {token: token_id for token_id, token in enumerate(tokens)}
        # Without merges a word of the vocabulary is one token, and any other one token a byte.
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        eos_token = tokens[SIMULATED_EOS_ID]
        backend.add_special_tokens([eos_token])
        return cls(
            backend,
            eos_token_ids=(SIMULATED_EOS_ID,),
            special_tokens={"eos_token": eos_token},
            chat_templates={
                "default": _SIMULATED_TEMPLATE
                if chat_template is None
                else _given_template(chat_template)
            },
        )

    # Text and tokens -----------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``, some 4 MB/s; other threads go on meanwhile.

        The library holds the GIL while it hands ids over, for 0.1 s with those of 5 MB. So long
        text is taken in pieces, where that makes no difference to what its tokens are.

        Raises:
            InvalidRequestError: The text is no Unicode (a lone surrogate).
        """
        if len(text) <= long_text.PIECE_CHARS:
            return self._encode(text, add_special_tokens)
        ids: list[int] = []

        def encode(part: str) -> list[int]:
            return self._encode(part, special=False)

        for piece in long_text.pieces(text, encode, piece_chars=long_text.PIECE_CHARS):
            ids += encode(piece)
        if not add_special_tokens:
            return ids
        before, after = self._frame
        return [*before, *ids, *after]

    def _encode(self, text: str, special: bool) -> list[int]:
        try:  # a batch of one: the library's own `encode` holds the GIL, and it is slower
            batch = self._backend.encode_batch_fast([text], add_special_tokens=special)
        except TypeError as error:
            raise InvalidRequestError("text must not hold a lone surrogate") from error
        return batch[0].ids

    @functools.cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        """The special tokens before and behind a text."""
        bare, framed = (self._encode("a", special) for special in (False, True))
        starts = range(len(framed) - len(bare) + 1)
        start = next(i for i in starts if framed[i : i + len(bare)] == bare)
        return framed[:start], framed[start + len(bare) :]

    @functools.cached_property
    def ends_texts(self) -> bool:
        """Whether a special token is put behind a text."""
        return bool(self._frame[1])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; ids past the vocabulary's end have none.

        Raises:
            InvalidRequestError: An id is negative, or too large to be one.
        """
        try:
            # A batch of one: that of the library that lets other threads go on.
            (text,) = self._backend.decode_batch(
                [list(ids)], skip_special_tokens=skip_special_tokens
            )
            return text
        except OverflowError as error:
            raise InvalidRequestError("token ids must be in [0, 2**32)", param="tokens") from error

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Return how the vocabulary spells each token; of an id past its end, nothing."""
        spell = self._backend.id_to_token
        return [spell(token_id) or "" for token_id in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for inside a text; of a special token, its name.

        Raises:
            InvalidRequestError: There is no such token.
        """
        try:
            return self.vocabulary.token_bytes(token_id)
        except KeyError:
            raise InvalidRequestError(f"there is no token {token_id}", param="tokens") from None

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """Bytes and text of each token. The first use takes 0.1 s for 49,152 of them."""
        return Vocabulary.from_json(self._backend.to_str().encode())

    @property
    def has_read_vocabulary(self) -> bool:
        """Whether ``vocabulary`` is at hand."""
        return "vocabulary" in self.__dict__

    def to_json(self) -> str:
        """Return it as the content of a ``tokenizer.json``."""
        return str(self._backend.to_str())

    # Conversations -------------------------------------------------------------------------------

    @property
    def has_chat_template(self) -> bool:
        """Whether ``render_chat`` can work."""
        return bool(self._templates)

    def template_mentions(self, word: str) -> bool:
        """Whether a chat template of the model has ``word`` in its source."""
        return any(word in source for source in self._templates.values())

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the text of a conversation, to be encoded without special tokens.

        Args:
            messages: As OpenAI has them.
            add_generation_prompt: End with what begins an answer of the assistant's.
            continue_final_message: End within the last message, instead.
            chat_template: A template's source, instead of the model's own.
            kwargs: Variables of the template, such as ``tools``.

        Raises:
            InvalidRequestError: The template refuses the messages, or there is no template.
        """
        if chat_template is None:
            template = self._template(with_tools=kwargs.get("tools") is not None)
        else:
            template = _clients_template(chat_template)
        variables = {
            **self._special_tokens,
            "add_generation_prompt": add_generation_prompt,
            **kwargs,
        }
        return template.render(messages, variables, continue_final=continue_final_message)

    def _template(self, *, with_tools: bool) -> ChatTemplate:
        names = [_TOOL_USE, "default"] if with_tools else ["default"]
        source = next((self._templates[name] for name in names if name in self._templates), None)
        if source is None:
            raise InvalidRequestError(
                "this model has no chat template; the server can be given one with --chat-template",
                param="messages",
            )
        try:
            return self._compiled(source)
        except ConfigError as error:
            raise InvalidRequestError(
                f"{error.message}; the server can be given another with --chat-template",
                param="messages",
            ) from error


def _clients_template(source: str) -> ChatTemplate:
    try:
        return ChatTemplate(source)
    except ConfigError as error:
        raise InvalidRequestError(error.message, param="chat_template") from error


def _given_template(chat_template: str) -> str:
    """Return the source of ``--chat-template``, which must compile: it was asked for."""
    source = chat_template
    if "{" not in chat_template:
        try:
            source = Path(chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"--chat-template {chat_template} cannot be read: {error}") from error
    ChatTemplate(source)
    return source


_SIMULATED_TEMPLATE: Final = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
