"""llama.cpp under measurement: its own `llama-server`, over HTTP, one process for each way of decoding."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.event_stream import post
from benchmarks.server_process import serving
from benchmarks.system import Answer, Arrival, Ask

CONTEXT = 4096
"""Tokens of a slot: prompt and answer."""


class LlamaServer:
    """A running llama-server."""

    name: str
    method: str

    def __init__(
        self, name: str, method: str, precision: str, url: str, session: aiohttp.ClientSession, temperature: float
    ) -> None:
        self.name = name
        self.method = method
        self.precision = precision
        self._url = url
        self._session = session
        self._temperature = temperature

    async def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        return list(await asyncio.gather(*map(self._answer, asks)))

    async def _answer(self, ask: Ask) -> Answer:
        body: dict[str, Any] = {
            "prompt": ask.token_ids,
            "n_predict": ask.num_tokens,
            "ignore_eos": True,
            "seed": ask.seed,
            "temperature": self._temperature,
            "stream": True,
            "return_tokens": True,
        }
        # Greedy needs the largest logit alone; without filters sampling is from the same distribution as elsewhere.
        body |= {"top_k": 1} if self._temperature == 0.0 else {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        sent_at = time.perf_counter()
        events = await post(self._session, f"{self._url}/completion", body)
        token_ids: list[int] = []
        arrivals: list[Arrival] = []
        for event in events:
            chunk = msgspec.json.decode(event.data)
            new = chunk.get("tokens", [])[: ask.num_tokens - len(token_ids)]
            if new:
                token_ids += new
                arrivals.append(Arrival(event.at - sent_at, len(new)))
        return Answer(token_ids=token_ids, arrivals=arrivals)


@asynccontextmanager
async def running_llama_server(
    name: str,
    method: str,
    *,
    server: Path,
    gguf: Path,
    flags: Sequence[str],
    num_threads: int,
    num_slots: int,
    temperature: float,
    session: aiohttp.ClientSession,
) -> AsyncIterator[LlamaServer]:
    """Start a llama-server on a GGUF file, with `num_slots` requests at once."""

    def command(port: int) -> list[str]:
        return [
            *(str(server), "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port)),
            *("--threads", str(num_threads), "--threads-batch", str(num_threads)),
            *("--parallel", str(num_slots), "--ctx-size", str(num_slots * CONTEXT)),
            *flags,
        ]

    async with serving(command, "/health") as running:
        async with session.get(f"{running.url}/props") as response:
            properties = await response.json()
        precision = f"weights {properties.get('model_ftype', 'as in the GGUF file')}, KV float16, cpu"
        yield LlamaServer(name, method, precision, running.url, session, temperature)
