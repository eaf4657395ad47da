"""The exactness run finds the one answer that differs."""

from __future__ import annotations

from typing import Any

from benchmarks.exactness import Sampling, Trial, line
from benchmarks.methods import Method
from benchmarks.system import Answer, Arrival, Ask

ASKS = {number: Ask(messages=[], token_ids=[number], num_tokens=4, seed=number) for number in (7, 8, 9)}


class ScriptedService:
    """Answers with the question's number, repeated; method `wrong` is wrong about question 8."""

    description = "scripted"

    def cpu_seconds(self) -> None:
        """It has no front."""

    async def chat(self, ask: Ask, speculation: dict[str, Any], **_: object) -> Answer:
        token_ids = [ask.seed] * ask.num_tokens
        if speculation["method"] == "wrong" and ask.seed == 8:
            token_ids[-1] = 0
        return Answer(token_ids=token_ids, arrivals=[Arrival(0.1, 4)], num_drafts=2, num_accepted=1)


async def test_a_differing_answer_is_named() -> None:
    """A method whose answers are plain decoding's is the same; of one whose are not, the questions are told."""
    trial = Trial(ScriptedService(), ASKS, Sampling(0.8, 0.95), "salt")  # type: ignore[arg-type]
    await trial.begin()
    right, wrong = Method("right", {"method": "right"}), Method("wrong", {"method": "wrong"})
    same = await trial.compare([right], 1)
    assert (same.different, same.num_answers, same.num_tokens, same.mean_acceptance_length) == ([], 3, 12, 1.5)
    assert line(same).endswith("the same")
    different = await trial.compare([wrong], 8)
    assert different.different == [8]
    assert "DIFFERENT: questions 8" in line(different)
    assert (await trial.compare([right, wrong], 8)).different == [8]
