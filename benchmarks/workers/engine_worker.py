"""forerun's engine alone, without the service around it: what the service adds is the difference."""

from __future__ import annotations

import os

# As the engine's own process does, before torch loads its thread pool.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
from collections.abc import Sequence

import msgspec

from benchmarks.workers.protocol import Clock, LineChannel, WorkerAnswer, WorkerAsk
from draft.config import NoSpeculation
from speculation.assembly import assemble
from speculation.messages import SamplingParams, Submit
from speculation.settings import EngineSettings


class EngineAlone:
    """An engine in this process, decoding plainly."""

    def __init__(self, settings: EngineSettings, *, temperature: float) -> None:
        self._engine, ready = assemble(settings)
        self.precision = ready.description
        self._temperature = temperature

    def answer(self, asks: Sequence[WorkerAsk]) -> list[WorkerAnswer]:
        clock = Clock(asks)
        for index, ask in enumerate(asks):
            sampling = SamplingParams(
                temperature=self._temperature, seed=ask["seed"], max_tokens=ask["num_tokens"], ignore_eos=True
            )
            request = Submit(
                request_id=str(index),
                prompt_token_ids=ask["token_ids"],
                sampling=sampling,
                speculation=NoSpeculation(),
            )
            refusal = self._engine.submit(request)
            if refusal is not None:
                raise RuntimeError(refusal.message)
        while self._engine.has_work:
            for output in self._engine.step():
                clock.note(int(output.request_id), output.token_ids)
        return clock.answers()


def main() -> None:
    """Serve one engine until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", required=True, help="EngineSettings as JSON")
    parser.add_argument("--temperature", type=float, required=True)
    arguments = parser.parse_args()
    channel = LineChannel()
    settings = msgspec.json.decode(arguments.settings, type=EngineSettings)
    channel.serve(EngineAlone(settings, temperature=arguments.temperature))


if __name__ == "__main__":
    main()
