"""What an engine takes from a front that it does not control: every field of a submit within its bounds."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from speculation.messages import SamplingParams, Submit
from speculation.submit_check import SubmitLimits, check_submit
from target.sampling_params import MAX_LOGPROBS, RANGES
from tests.speculation.running import Run, engine_with, plain_loop, request_of
from tests.speculation.token_runner import VOCAB_SIZE

LIMITS = SubmitLimits(vocab_size=100, context=50)
HUGE = 2**64 - 1
"""The largest integer that a message can carry."""

WRONG_SAMPLING: list[tuple[dict[str, Any], str, str]] = [
    *(
        ({name: value}, name, "must be")
        for name, allowed in RANGES.items()
        for value in (math.nan, math.inf, -math.inf, allowed.low - 0.1, allowed.high + 0.1)
    ),
    ({"top_p": 0.0}, "top_p", "above 0 and at most 1"),
    ({"top_k": -1}, "top_k", "from 0 to 9223372036854775807"),
    ({"top_k": 2**63}, "top_k", "from 0 to 9223372036854775807"),
    ({"seed": -1}, "seed", "from 0 to 18446744073709551615"),
    ({"max_tokens": -1}, "max_tokens", "at least 0"),
    ({"max_tokens": -(2**63)}, "max_tokens", "at least 0"),
    ({"max_tokens": HUGE}, "max_tokens", "exceed the context of 50"),
    ({"max_tokens": 48}, "max_tokens", "exceed the context of 50"),
    ({"min_tokens": -1}, "min_tokens", "from 0 to 16"),
    ({"min_tokens": 17}, "min_tokens", "from 0 to 16"),
    ({"logprobs": -1}, "logprobs", "from 0 to 100"),
    ({"logprobs": 101}, "logprobs", "from 0 to 100"),
    ({"logprobs": HUGE}, "logprobs", "from 0 to 100"),
    ({"stop_token_ids": (100,)}, "stop_token_ids", "between 0 and 99"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids", "between 0 and 99"),
    ({"stop_token_ids": (5,) * 101}, "stop_token_ids", "at most 100"),
    ({"logit_bias": {100: 1.0}}, "logit_bias", "between 0 and 99"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias", "between 0 and 99"),
    ({"logit_bias": {HUGE: 1.0}}, "logit_bias", "between 0 and 99"),
    ({"logit_bias": {5: math.nan}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {5: math.inf}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {5: 100.5}}, "logit_bias", "from -100 to 100"),
]
WRONG_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"request_id": "x" * 513}, "request_id", "at most 512"),
    ({"cache_salt": "x" * 1025}, "cache_salt", "at most 1024"),
    ({"priority": HUGE}, "priority", "from -1000000 to 1000000"),
    ({"prompt_token_ids": []}, "prompt", "no tokens"),
    ({"prompt_token_ids": [1] * 50}, "max_tokens", "exceed the context of 50"),
    ({"prompt_token_ids": [1, 100]}, "prompt", "between 0 and 99"),
    ({"prompt_token_ids": [-1]}, "prompt", "between 0 and 99"),
    ({"output_token_ids": [1] * 17}, "output_token_ids", "at most max_tokens, 16"),
    ({"output_token_ids": [HUGE]}, "output_token_ids", "between 0 and 99"),
    ({"prediction_token_ids": [100]}, "prediction", "between 0 and 99"),
    ({"prediction_token_ids": [1] * 51}, "prediction", "at most 50"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "from 0 to 100"),
    ({"prompt_logprobs": 101}, "prompt_logprobs", "from 0 to 100"),
]


def submit(sampling: dict[str, Any] | None = None, **fields: Any) -> Submit:
    return Submit(
        **{"request_id": "a", "prompt_token_ids": [1, 2, 3], "sampling": SamplingParams(**(sampling or {})), **fields}
    )


@pytest.mark.parametrize(
    ("request_", "param", "says"),
    [
        *((submit(sampling), param, says) for sampling, param, says in WRONG_SAMPLING),
        *((submit(**fields), param, says) for fields, param, says in WRONG_FIELDS),
    ],
)
def test_a_wrong_number_is_named(request_: Submit, param: str, says: str) -> None:
    """Each number outside its bounds, NaN and infinities included, is refused with its field and what is right."""
    rejected = check_submit(request_, LIMITS)
    assert rejected is not None
    assert (rejected.request_id, rejected.code, rejected.param) == (request_.request_id, "invalid", param)
    assert says in rejected.message
    assert len(rejected.message) < 300


def test_the_bounds_themselves_are_served() -> None:
    """The largest and the smallest value of each field are taken, through MessagePack as they would come."""
    for bound in ("low", "high"):
        numbers = {name: getattr(allowed, bound) for name, allowed in RANGES.items() if not allowed.is_open}
        sampling = {"top_k": 2**63 - 1, "seed": HUGE, "logprobs": 100, "max_tokens": 47, "min_tokens": 47}
        biases = {"logit_bias": {0: -100.0, 99: 100.0}, "stop_token_ids": (0, 99)}
        request = submit(
            {**numbers, **sampling, **biases},
            output_token_ids=[99] * 47,
            prediction_token_ids=[99] * 50,
            prompt_logprobs=100,
            priority=1_000_000,
        )
        received = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Submit)
        assert check_submit(received, LIMITS) is None


def test_logprobs_of_a_long_prompt_fit_in_a_message() -> None:
    """Alternatives are bounded whatever the vocabulary, and further where the prompt is long."""
    limits = SubmitLimits(vocab_size=200_000, context=200_000)
    assert check_submit(submit({"logprobs": MAX_LOGPROBS}, prompt_logprobs=MAX_LOGPROBS), limits) is None
    rejected = check_submit(submit({"logprobs": MAX_LOGPROBS + 1}), limits)
    assert rejected is not None
    assert rejected.param == "logprobs"
    rejected = check_submit(submit(prompt_token_ids=[1] * 100_000, prompt_logprobs=21), limits)
    assert rejected is not None
    assert "with 100000 prompt tokens at most 20 are served" in rejected.message


def test_an_engine_serves_on_after_every_wrong_submit() -> None:
    """Nothing of a wrong submit is kept, and a right one beside it gets the plain loop's tokens."""
    run = Run(engine_with())
    right = request_of("right", [1, 2, 3], max_tokens=12, temperature=1.0, seed=4, top_k=2**61)
    run.submit(right)
    wrong = [*(fields for fields, _, _ in WRONG_FIELDS), {"prediction_token_ids": [VOCAB_SIZE]}]
    requests = [submit(sampling) for sampling, _, _ in WRONG_SAMPLING] + [submit(**fields) for fields in wrong]
    num_refused = 0
    for request in requests:
        num_refused += run.engine.submit(request) is not None
        run.engine.abort(request.request_id)
        run.step()
    assert num_refused >= len(requests) - 4  # the context of the engine is longer than that of `LIMITS`
    run.until_idle()
    assert run.tokens["right"] == plain_loop(right)
    assert run.engine.stats().blocks_in_use == 0


@pytest.mark.parametrize("num_output", [11, 12])
def test_a_sequence_that_comes_with_all_its_tokens_ends(num_output: int) -> None:
    """Where as many tokens were generated elsewhere as may be, the sequence ends at once and holds no block."""
    whole = request_of("a", [1, 2, 3], max_tokens=12)
    tokens = plain_loop(whole)
    run = Run(engine_with())
    run.submit(msgspec.structs.replace(whole, output_token_ids=tokens[:num_output]))
    run.until_idle()
    assert run.tokens["a"] == tokens[num_output:]
    assert run.finished["a"].finish_reason == "length"
    assert run.engine.stats().blocks_in_use == 0
