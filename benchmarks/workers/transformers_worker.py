"""`transformers.generate`, plain or with prompt lookup or an assistant model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.workers.protocol import Clock, LineChannel, WorkerAnswer, WorkerAsk


class ArrivalStreamer:
    """What `generate` tells of new tokens; it begins with the prompts, which are passed over."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._has_begun = False

    def put(self, token_ids: Any) -> None:
        """One token of every sequence, shape (batch,), or several of the only one, shape (tokens,)."""
        if not self._has_begun:
            self._has_begun = True
            return
        flat = token_ids.reshape(-1).tolist()
        if len(self._clock.token_ids) == 1:
            self._clock.note(0, flat)
            return
        for index, token_id in enumerate(flat):
            self._clock.note(index, [token_id])

    def end(self) -> None:
        """Nothing is held back."""


class Transformers:
    """A model folder in memory: float32 on a CPU, bfloat16 on a CUDA device."""

    def __init__(
        self, folder: str, *, num_threads: int, lookup_tokens: int, assistant: str | None, temperature: float
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(num_threads)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self._device == "cuda" else torch.float32

        def load(path: str) -> Any:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(self._device).eval()
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
            return model

        self.precision = f"{str(dtype).removeprefix('torch.')}, {self._device}"
        self._model = load(folder)
        self._options: dict[str, Any] = {"do_sample": temperature > 0.0}
        if temperature > 0.0:
            self._options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        if assistant is not None:
            self._options["assistant_model"] = load(assistant)
        elif lookup_tokens:
            self._options["prompt_lookup_num_tokens"] = lookup_tokens

    def answer(self, asks: Sequence[WorkerAsk]) -> list[WorkerAnswer]:
        import torch

        torch.manual_seed(asks[0]["seed"])
        longest = max(len(ask["token_ids"]) for ask in asks)
        clock = Clock(asks)
        rows = [[0] * (longest - len(ask["token_ids"])) + ask["token_ids"] for ask in asks]
        masks = [[0] * (longest - len(ask["token_ids"])) + [1] * len(ask["token_ids"]) for ask in asks]
        self._model.generate(
            torch.tensor(rows, device=self._device),
            attention_mask=torch.tensor(masks, device=self._device),
            max_new_tokens=max(ask["num_tokens"] for ask in asks),
            streamer=ArrivalStreamer(clock),
            **self._options,
        )
        return clock.answers()


def main() -> None:
    """Serve one model until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--lookup-tokens", type=int, default=0)
    parser.add_argument("--assistant")
    arguments = parser.parse_args()
    channel = LineChannel()
    system = Transformers(
        arguments.model,
        num_threads=arguments.threads,
        lookup_tokens=arguments.lookup_tokens,
        assistant=arguments.assistant,
        temperature=arguments.temperature,
    )
    channel.serve(system)


if __name__ == "__main__":
    main()
