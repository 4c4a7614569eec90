"""From ``Add`` to ``Request``: everything that can be wrong with one is found here."""

from __future__ import annotations

import random
from array import array
from typing import TYPE_CHECKING, Final

from trioengine.engine_proc.request import Request, TextBuilder
from trioengine.engine_proc.sampling_extras import SamplingExtras
from trioengine.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.protocol import Add, ModelInfo
    from trioengine.sampling_params import SamplingParams

__all__ = ["Intake"]

_SEED_MASK: Final = 2**64 - 1


class Intake:
    """Checks what the wire's types cannot, and gives each request its rank, seed and limits."""

    def __init__(
        self, model: ModelInfo, make_text: Callable[[SamplingParams], TextBuilder], *, seed: int
    ) -> None:
        """Prepare for requests to ``model``.

        Args:
            model: Its length, vocabulary and end-of-sequence ids.
            make_text: Builds the detokenizer of one sequence.
            seed: Where the seeds of requests without one come from.
        """
        self._model = model
        self._make_text = make_text
        self._random = random.Random(seed)
        self._eos_ids = frozenset(model.eos_token_ids)
        self._arrivals = 0

    def make_request(self, add: Add) -> Request:
        """Return the request of an ``Add``.

        Raises:
            InvalidRequestError: The prompt cannot be served, or a parameter names a token that the
                vocabulary lacks.
        """
        params = add.params
        self._check_prompt(add.prompt_token_ids, scored_only=params.max_tokens == 0)
        params.check_token_ids(self._model.vocab_size)
        eos_ids = frozenset[int]() if params.ignore_eos else self._eos_ids
        self._arrivals += 1
        return Request(
            request_id=add.request_id,
            tokens=array("i", add.prompt_token_ids),
            num_prompt_tokens=len(add.prompt_token_ids),
            params=params,
            seed=self._random.getrandbits(64) if params.seed is None else params.seed & _SEED_MASK,
            rank=(add.priority, self._arrivals),
            max_len=self._max_len(add),
            eos_ids=eos_ids,
            ending_ids=eos_ids.union(params.stop_token_ids),
            text=self._make_text(params),
            single_steps=_looks_back(params),
            extras=SamplingExtras.of(params, add.prompt_token_ids, self._model.vocab_size),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )

    def _max_len(self, add: Add) -> int:
        if add.params.max_tokens is None:
            return self._model.max_model_len
        return min(self._model.max_model_len, len(add.prompt_token_ids) + add.params.max_tokens)

    def _check_prompt(self, token_ids: list[int], *, scored_only: bool) -> None:
        if not token_ids:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        if len(token_ids) + (not scored_only) > self._model.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(token_ids)} tokens, which leaves no room for an answer "
                f"within {self._model.max_model_len}",
                param="prompt",
                code="context_length_exceeded",
            )
        if min(token_ids) < 0 or max(token_ids) >= self._model.vocab_size:
            raise InvalidRequestError(
                f"token ids of the prompt must be in [0, {self._model.vocab_size})", param="prompt"
            )


def _looks_back(params: SamplingParams) -> bool:
    """Say whether how a token is sampled depends on which ones came before it."""
    return bool(
        params.structured is not None
        or params.bad_words_token_ids
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )
