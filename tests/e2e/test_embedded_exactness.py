"""The promise on the embedded model: the same tokens with and without speculation, alone and in company."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from draft.config import (
    AutoConfig,
    DraftModelConfig,
    Eagle3Config,
    FirstConfig,
    NgramConfig,
    NoSpeculation,
    SpeculationConfig,
    SuffixConfig,
)
from speculation.assembly import assemble
from speculation.engine import Engine
from speculation.messages import RequestMetrics, SamplingParams, Submit
from speculation.settings import EngineSettings
from target.checkpoint import truncate_checkpoint
from target.embedded import default_cache_dir, embedded_model_dir

QUESTIONS = (
    "Repeat this list, sorted by price: pear 3, apple 1, plum 2, fig 5, kiwi 4.",
    "def add(a, b):\n    return a + b\n\nRename the function to `plus` and its arguments to `x` and `y`.",
    "Why is the sky blue? Answer in two sentences.",
    "Correct the spelling: The quik brown fox jumpd over the lazy dog, and the dog dit not mind.",
)
CONFIGS: dict[str, SpeculationConfig] = {
    "ngram": NgramConfig(num_speculative_tokens=5),
    "suffix": SuffixConfig(num_speculative_tokens=6, tree_size=10),
    "draft_model": DraftModelConfig(num_speculative_tokens=3),
    "first": FirstConfig(proposers=(NgramConfig(num_speculative_tokens=4), DraftModelConfig(num_speculative_tokens=2))),
    "adaptive": NgramConfig(),
    "eagle3": Eagle3Config(num_speculative_tokens=4),
    "eagle3 tree": Eagle3Config(num_speculative_tokens=5, tree_size=16),
    "auto": AutoConfig(),
}
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=1234, max_tokens=24),
}


@pytest.fixture(scope="module", params=["auto", "torch"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The embedded model with its own first layers as a poor draft model, on each path of this machine."""
    draft = tmp_path_factory.mktemp("draft") / "first-layers"
    truncate_checkpoint(embedded_model_dir(), draft, 3)
    settings = EngineSettings(
        draft_model=str(draft),
        cache_dir=str(default_cache_dir()),
        num_blocks=128,
        backend=request.param,
        max_num_batched_tokens=48,
        speculation=NoSpeculation(),
    )
    return assemble(settings)[0]


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(Path(embedded_model_dir()) / "tokenizer.json"))
    chats = (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS)
    return [tokenizer.encode(chat).ids for chat in chats]


def answers(
    engine: Engine, configs: list[SpeculationConfig], sampling: SamplingParams, *, together: bool
) -> tuple[list[list[int]], list[RequestMetrics]]:
    """An answer for each question and config, whichever are more; prefixes are not shared with other calls.

    The questions are asked in turn, and so are the configs.
    """
    tokens: dict[str, list[int]] = {}
    metrics: dict[str, RequestMetrics] = {}
    known = prompts()
    count = max(len(known), len(configs))
    for i in range(count):
        tokens[str(i)] = []
        submit = Submit(
            request_id=str(i),
            prompt_token_ids=known[i % len(known)],
            sampling=sampling,
            speculation=configs[i % len(configs)],
            cache_salt=f"{configs}{sampling.temperature}{together}",
        )
        assert engine.submit(submit) is None
        while engine.has_work and not (together and i < count - 1):
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
                if output.metrics is not None:
                    metrics[output.request_id] = output.metrics
            engine.check()
    return [tokens[str(i)] for i in range(len(tokens))], [metrics[str(i)] for i in range(len(tokens))]


@pytest.fixture(scope="module", params=SAMPLINGS)
def sampling(request: pytest.FixtureRequest) -> SamplingParams:
    return SAMPLINGS[request.param]


@pytest.fixture(scope="module")
def expected(engine: Engine, sampling: SamplingParams) -> list[list[int]]:
    """The answers of plain decoding, one at a time."""
    tokens, _ = answers(engine, [NoSpeculation()], sampling, together=False)
    assert all(tokens)
    return tokens


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("name", CONFIGS)
def test_speculation_changes_no_token(
    engine: Engine, sampling: SamplingParams, expected: list[list[int]], name: str, together: bool
) -> None:
    """Every method, alone and in a batch, gives exactly the tokens of plain decoding."""
    tokens, metrics = answers(engine, [CONFIGS[name]], sampling, together=together)
    assert tokens == expected
    if name not in {"adaptive", "auto"}:
        assert sum(m.num_drafts for m in metrics) > 0


def test_a_batch_of_all_methods_changes_no_token(
    engine: Engine, sampling: SamplingParams, expected: list[list[int]]
) -> None:
    """Sequences of different methods in one batch get exactly the tokens of plain decoding."""
    mixed, _ = answers(engine, [NoSpeculation(), *CONFIGS.values()], sampling, together=True)
    assert mixed == [expected[i % len(expected)] for i in range(len(mixed))]


def test_copying_answers_are_guessed(engine: Engine) -> None:
    """On prompts whose answers copy, lookup has several tokens accepted a step."""
    _, metrics = answers(engine, [CONFIGS["ngram"]], SAMPLINGS["greedy"], together=False)
    best = max(1 + m.num_accepted_tokens / m.num_drafts for m in metrics if m.num_drafts)
    assert best > 2.0
