"""What one sampled token does to its sequence, and the delta that says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trioengine.engine_proc.runner import NO_TOKEN
from trioengine.errors import InternalError, InvalidRequestError
from trioengine.outputs import FinishReason, RequestOutput

if TYPE_CHECKING:
    from trioengine.engine_proc.request import Request
    from trioengine.outputs import TokenLogprob
    from trioengine.sampling_params import SamplingParams

__all__ = ["ALIEN_TOKEN", "error_output", "extend", "merged"]

ALIEN_TOKEN: Final = -2
"""Stands for whatever is not in the vocabulary."""


def extend(request: Request, token: int, logprob: TokenLogprob | None) -> RequestOutput:
    """Append a sampled token to its sequence; return the delta, terminal if that ends it.

    Raises:
        InternalError: There is no token, or none that the vocabulary has.
        InvalidRequestError: What the request allows leaves no token here.
        Exception: Whatever its detokenizer raises.
    """
    if len(request.tokens) >= request.max_len:  # nothing was to be generated
        output = RequestOutput(request.request_id, finish_reason=FinishReason.LENGTH)
        output.num_cached_tokens = request.num_cached_tokens
        output.prompt_logprobs = request.prompt_logprobs
        return output
    if token == NO_TOKEN:
        if request.grammar is not None:
            request.grammar.check()
        raise _nothing_left(request.params)
    if token < 0:
        raise InternalError("the model gave a token outside its vocabulary")
    tokens, new_ids = request.tokens, [token]
    tokens.append(token)
    complete = request.grammar is not None and request.grammar.accept(token)
    reason: FinishReason | None = None
    stop_reason: int | str | None = None
    if token in request.ending_ids:
        text = ""
        if request.params.include_stop_str_in_output:
            text, _, _ = request.text.append(new_ids)
        text += request.text.flush()
        reason = FinishReason.STOP
        stop_reason = None if token in request.eos_ids else token
    else:
        text, stop_reason, _ = request.text.append(new_ids)
        if stop_reason is not None:
            reason = FinishReason.STOP
        elif complete:
            reason = FinishReason.STOP
            text += request.text.flush()
        elif len(tokens) >= request.max_len:
            reason = FinishReason.LENGTH
            text += request.text.flush()
    output = RequestOutput(request.request_id, text, new_ids, reason, stop_reason)
    if logprob is not None:
        output.logprobs = [logprob]
    if request.num_output_tokens == 1:
        output.num_cached_tokens = request.num_cached_tokens
        output.prompt_logprobs = request.prompt_logprobs
    return output


def _nothing_left(params: SamplingParams) -> Exception:
    """Return the error of a sequence that no token may follow: its own fault where it bans any."""
    for name, bans in (
        ("allowed_token_ids", params.allowed_token_ids is not None),
        ("bad_words", bool(params.bad_words_token_ids)),
    ):
        if bans:
            return InvalidRequestError(
                f"'{name}' and the other parameters leave no token that may come here.", param=name
            )
    return InternalError("no token of the vocabulary is allowed here")


def error_output(request_id: int, error: Exception) -> RequestOutput:
    """Return the terminal of a sequence that its own fault has ended."""
    message = str(error) or type(error).__name__
    output = RequestOutput(request_id, finish_reason=FinishReason.ERROR, error=message)
    if isinstance(error, InvalidRequestError):
        output.refused, output.param = True, error.param
    return output


def merged(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Return one delta a request, each made of its own in their order."""
    by_id: dict[int, RequestOutput] = {}
    for output in outputs:
        if (earlier := by_id.setdefault(output.request_id, output)) is not output:
            earlier.merge(output)
    return list(by_id.values())
