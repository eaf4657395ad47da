"""OpenVINO GenAI's LLMPipeline on a GGUF file, plain or with prompt lookup."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.workers.protocol import Clock, LineChannel, WorkerAnswer, WorkerAsk


class OpenVino:
    """A pipeline in memory."""

    def __init__(self, path: str, *, num_threads: int, lookup_tokens: int, temperature: float) -> None:
        import openvino
        import openvino_genai

        self._openvino = openvino
        self._genai = openvino_genai
        self._lookup_tokens = lookup_tokens
        self._temperature = temperature
        options: dict[str, Any] = {"prompt_lookup": True} if lookup_tokens else {}
        self._pipeline = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=num_threads, **options)
        self.precision = f"weights as in the GGUF file, OpenVINO {openvino_genai.__version__}, cpu"

    def answer(self, asks: Sequence[WorkerAsk]) -> list[WorkerAnswer]:
        import numpy as np

        longest = max(len(ask["token_ids"]) for ask in asks)
        clock = Clock(asks)
        ids = np.zeros((len(asks), longest), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, ask in enumerate(asks):
            ids[row, longest - len(ask["token_ids"]) :] = ask["token_ids"]
            mask[row, longest - len(ask["token_ids"]) :] = 1
        inputs = self._genai.TokenizedInputs(self._openvino.Tensor(ids), self._openvino.Tensor(mask))
        if len(asks) == 1:
            self._pipeline.generate(inputs, self._config(asks), self._streamer(clock))
        else:  # it streams only one answer at a time
            result = self._pipeline.generate(inputs, self._config(asks))
            for index, token_ids in enumerate(result.tokens):
                clock.note(index, token_ids)
        return clock.answers()

    def _config(self, asks: Sequence[WorkerAsk]) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = max(ask["num_tokens"] for ask in asks)
        config.ignore_eos = True
        config.do_sample = self._temperature > 0.0
        if config.do_sample:
            config.temperature = self._temperature
            config.rng_seed = asks[0]["seed"]
        if self._lookup_tokens:
            config.num_assistant_tokens = self._lookup_tokens
            config.max_ngram_size = 3
        return config

    def _streamer(self, clock: Clock) -> Any:
        running = self._genai.StreamingStatus.RUNNING

        class ArrivalStreamer(self._genai.StreamerBase):  # type: ignore[misc,name-defined]
            """Notes tokens as they come."""

            def write(self, token: int | Sequence[int]) -> Any:
                clock.note(0, [token] if isinstance(token, int) else token)
                return running

            def end(self) -> None:
                """Nothing is held back."""

        return ArrivalStreamer()


def main() -> None:
    """Serve one model until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--lookup-tokens", type=int, default=0)
    arguments = parser.parse_args()
    channel = LineChannel()
    system = OpenVino(
        arguments.model,
        num_threads=arguments.threads,
        lookup_tokens=arguments.lookup_tokens,
        temperature=arguments.temperature,
    )
    channel.serve(system)


if __name__ == "__main__":
    main()
