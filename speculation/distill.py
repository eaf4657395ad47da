"""Self-distillation: the target's own prompts and answers, made by the engine that serves, its features recorded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol

from draft.config import Eagle3Config, NoSpeculation, SpeculationConfig
from draft.roster import Roster
from draft.training.feature_store import FeatureStore
from draft.training.prompts import ChatTokens, Opening, openings
from draft.training.recorder import FeatureRecorder, prompt_key
from speculation.controller import DraftLengthController
from speculation.cost_model import StepCostModel
from speculation.engine import Engine
from speculation.messages import SamplingParams, SequenceOutput, Submit
from target.runner import Runner

BATCH = 40
"""Sequences that are generated at the same time."""
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
"""Answers take turns: what is served most is greedy, but its text is less diverse."""


class Progress(Protocol):
    """A progress bar (tqdm's)."""

    def update(self, n: int) -> object:
        """So many more are done."""


def generation_engine(runner: Runner, store: FeatureStore | None, fingerprint: str) -> Engine:
    """An engine for throughput, that records into `store` what sequences with an `Eagle3Config` compute."""
    return Engine(
        runner,
        Roster({} if store is None else {"eagle3": FeatureRecorder(store)}),
        DraftLengthController(StepCostModel()),
        model_fingerprint=fingerprint,
        default_config=NoSpeculation(),
        max_num_seqs=BATCH,
        max_num_batched_tokens=8 * BATCH,
        max_waiting=2 * BATCH,
    )


def run_all(engine: Engine, requests: Iterable[Submit]) -> Iterator[tuple[Submit, list[int]]]:
    """Every request with its output tokens, in the order they end; the engine is kept full and never holds them all.

    Raises ValueError with the engine's words for a request it refuses.
    """
    waiting = iter(requests)
    running: dict[str, tuple[Submit, list[int]]] = {}
    while True:
        for request in islice(waiting, BATCH - len(running)):
            refusal = engine.submit(request)
            if refusal is not None:
                raise ValueError(refusal.message)
            running[request.request_id] = request, []
        if not running:
            return
        for output in engine.step():
            yield from _ended(running, output)


def _ended(running: dict[str, tuple[Submit, list[int]]], output: SequenceOutput) -> Iterator[tuple[Submit, list[int]]]:
    request, token_ids = running[output.request_id]
    token_ids += output.token_ids
    if output.finish_reason is not None:
        del running[output.request_id]
        yield request, token_ids


def make_prompts(
    runner: Runner, chat: ChatTokens, path: Path, count: int, *, seed: int, fingerprint: str, progress: Progress
) -> None:
    """Let the target write `count` users' turns into `path`, one JSON object a line; goes on where it was stopped."""
    done = _numbers_in(path)
    progress.update(len(done))
    engine = generation_engine(runner, None, fingerprint)
    todo = {str(i): opening for i, opening in enumerate(openings(count, seed)) if i not in done}

    def request_for(number: str, opening: Opening) -> Submit:
        """What fits a small context is asked for, and no more."""
        turn = chat.open_turn(opening.text)
        max_tokens = min(opening.max_tokens, engine.max_model_len - len(turn))
        sampling = SamplingParams(
            temperature=1.0,
            top_p=0.98,
            seed=seed + int(number),
            max_tokens=max_tokens,
            min_tokens=min(opening.min_tokens, max_tokens),
        )
        return Submit(request_id=number, prompt_token_ids=turn, sampling=sampling, speculation=NoSpeculation())

    requests = (request_for(number, opening) for number, opening in todo.items())
    with path.open("a", encoding="utf-8") as file:
        for request, token_ids in run_all(engine, requests):
            text = (todo[request.request_id].text + chat.decode(token_ids)).strip()
            file.write(json.dumps({"number": int(request.request_id), "prompt": text}) + "\n")
            file.flush()
            progress.update(1)


def record_answers(
    runner: Runner,
    prompts: Iterable[list[int]],
    store: FeatureStore,
    *,
    max_answer_tokens: int,
    seed: int,
    fingerprint: str,
    progress: Progress,
) -> None:
    """Let the target answer the prompts it has not answered yet, until they or the store's room are used up."""
    known = {sequence.key for sequence in store.sequences}
    progress.update(store.num_tokens)
    engine = generation_engine(runner, store, fingerprint)
    longest = engine.max_model_len - max_answer_tokens
    recording: SpeculationConfig = Eagle3Config()

    def requests() -> Iterator[Submit]:
        for number, prompt in enumerate(prompts):
            key = prompt_key(prompt)
            if store.is_full:
                return
            if key in known or len(prompt) > longest:
                continue
            known.add(key)
            sampling = SamplingParams(
                temperature=TEMPERATURES[number % len(TEMPERATURES)], seed=seed + number, max_tokens=max_answer_tokens
            )
            # Another salt than the prompts had: the features of a prompt found in the cache would be missing.
            yield Submit(
                request_id=str(number),
                prompt_token_ids=prompt,
                sampling=sampling,
                speculation=recording,
                cache_salt="answers",
            )

    before = store.num_tokens
    for _ in run_all(engine, requests()):
        progress.update(store.num_tokens - before)
        before = store.num_tokens


def _numbers_in(path: Path) -> set[int]:
    """The numbers of the lines of a file that was perhaps cut off in its last one, which is then removed."""
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    return {int(json.loads(line)["number"]) for line in whole.splitlines()}
