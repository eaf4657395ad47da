"""The check of a `Submit` before an engine takes it: every number within what it means to this engine.

A front checks what its clients send, but a stand-alone engine serves fronts that it does not control, and an id or a
count beyond these bounds would index memory that is not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from speculation.messages import Rejected, SamplingParams, Submit
from target.sampling_params import BIAS, MAX_LOGPROBS, MAX_SEED, MAX_TOP_K, RANGES

MAX_PROMPT_LOGPROBS = 2_000_000
"""Most alternatives of all prompt tokens together: about 30 MB in the one message that reports them."""
MAX_PRIORITY = 1_000_000
MAX_ID_LENGTH = 512
"""Most characters of a request id."""
MAX_SALT_LENGTH = 1024
"""Most characters of a cache salt; fronts send a digest or at most 256 characters."""


class SubmitLimits(NamedTuple):
    """The sizes of an engine that bound what it can be asked for."""

    vocab_size: int
    context: int
    """Most tokens of a sequence, prompt and output together."""


class _Problem(NamedTuple):
    """One field that cannot be served."""

    param: str
    message: str


def check_submit(submit: Submit, limits: SubmitLimits) -> Rejected | None:
    """A rejection that names the first wrong field, its value and what is right; None where all can be served."""
    for problem in _problems(submit, limits):
        return Rejected(
            request_id=submit.request_id, code="invalid", message=problem.message, param=problem.param or None
        )
    return None


def _problems(submit: Submit, limits: SubmitLimits) -> Iterator[_Problem]:
    sampling, context = submit.sampling, limits.context
    yield from _whole("priority", submit.priority, -MAX_PRIORITY, MAX_PRIORITY)
    yield from _length("request_id", len(submit.request_id), MAX_ID_LENGTH, "characters")
    yield from _length("cache_salt", len(submit.cache_salt), MAX_SALT_LENGTH, "characters")
    if not submit.prompt_token_ids:
        yield _Problem("prompt", "the prompt has no tokens; at least one is needed")
    yield from _lengths(submit, context)
    yield from _sampling(sampling, limits)
    num_prompt, num_output = len(submit.prompt_token_ids), len(submit.output_token_ids)
    if num_output > sampling.max_tokens:
        message = f"output_token_ids has {num_output} ids; at most max_tokens, {sampling.max_tokens}, can be there"
        yield _Problem("output_token_ids", message)
    yield from _logprobs("prompt_logprobs", submit.prompt_logprobs, limits)
    if num_prompt * (submit.prompt_logprobs or 0) > MAX_PROMPT_LOGPROBS:
        most = MAX_PROMPT_LOGPROBS // num_prompt
        message = (
            f"prompt_logprobs is {submit.prompt_logprobs}; with {num_prompt} prompt tokens at most {most} are served"
        )
        yield _Problem("prompt_logprobs", message)
    yield from _token_ids("prompt", submit.prompt_token_ids, limits)
    yield from _token_ids("output_token_ids", submit.output_token_ids, limits)
    yield from _token_ids("prediction", submit.prediction_token_ids, limits)


def _lengths(submit: Submit, context: int) -> Iterator[_Problem]:
    """Lengths, before anything walks over the lists."""
    num_prompt, max_tokens = len(submit.prompt_token_ids), submit.sampling.max_tokens
    if max_tokens < 0:
        yield _Problem("max_tokens", f"max_tokens is {max_tokens}; it must be at least 0")
    if num_prompt + max_tokens > context:
        message = f"{num_prompt} prompt tokens and max_tokens {max_tokens} exceed the context of {context}"
        yield _Problem("max_tokens", message)
    yield from _length("prediction", len(submit.prediction_token_ids), context, "tokens")


def _sampling(sampling: SamplingParams, limits: SubmitLimits) -> Iterator[_Problem]:
    for name, allowed in RANGES.items():
        value = getattr(sampling, name)
        if value not in allowed:
            yield _Problem(name, f"{name} is {value}; it must be {allowed}")
    yield from _whole("top_k", sampling.top_k, 0, MAX_TOP_K)
    yield from _whole("seed", sampling.seed, 0, MAX_SEED)
    yield from _whole("min_tokens", sampling.min_tokens, 0, sampling.max_tokens)
    yield from _logprobs("logprobs", sampling.logprobs, limits)
    yield from _length("stop_token_ids", len(sampling.stop_token_ids), limits.vocab_size, "ids")
    yield from _token_ids("stop_token_ids", sampling.stop_token_ids, limits)
    yield from _token_ids("logit_bias", sampling.logit_bias, limits)
    for token_id, bias in sampling.logit_bias.items():
        if bias not in BIAS:
            yield _Problem("logit_bias", f"logit_bias of token id {token_id} is {bias}; it must be {BIAS}")


def _whole(name: str, value: int, low: int, high: int) -> Iterator[_Problem]:
    if not low <= value <= high:
        yield _Problem(name, f"{name} is {value}; it must be from {low} to {high}")


def _logprobs(name: str, value: int | None, limits: SubmitLimits) -> Iterator[_Problem]:
    if value is not None:
        yield from _whole(name, value, 0, min(MAX_LOGPROBS, limits.vocab_size))


def _length(name: str, length: int, most: int, what: str) -> Iterator[_Problem]:
    if length > most:
        yield _Problem(name, f"{name} has {length} {what}; at most {most} are served")


def _token_ids(name: str, token_ids: Iterable[int], limits: SubmitLimits) -> Iterator[_Problem]:
    wrong = next((token_id for token_id in token_ids if not 0 <= token_id < limits.vocab_size), None)
    if wrong is not None:
        yield _Problem(name, f"{name} has {wrong}; token ids must be between 0 and {limits.vocab_size - 1}")
