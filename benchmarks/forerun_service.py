"""forerun under measurement: the real service, over HTTP, with one of its methods."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from benchmarks.event_stream import post
from benchmarks.server_process import Command, Server, cpu_seconds, serving
from benchmarks.system import Answer, Arrival, Ask


class ForerunService:
    """A running service."""

    def __init__(self, server: Server, session: aiohttp.ClientSession, description: str) -> None:
        self.description = description
        self._server = server
        self._session = session

    async def chat(
        self,
        ask: Ask,
        speculation: dict[str, Any],
        *,
        temperature: float,
        top_p: float,
        salt: str,
        ignore_eos: bool,
    ) -> Answer:
        """One chat completion, streamed. Raises RuntimeError if the service reads another prompt than was meant."""
        body = {
            "messages": ask.messages,
            "max_tokens": ask.num_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "seed": ask.seed,
            "ignore_eos": ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "speculation": speculation,
            "cache_salt": salt,
        }
        sent_at = time.perf_counter()
        events = await post(self._session, f"{self._server.url}/v1/chat/completions", body)
        token_ids: list[int] = []
        arrivals: list[Arrival] = []
        chunk: dict[str, Any] = {}
        for event in events:
            chunk = msgspec.json.decode(event.data)
            if "error" in chunk:
                raise RuntimeError(f"the service broke off: {chunk['error']['message']}")
            for choice in chunk["choices"]:
                if choice["token_ids"]:
                    token_ids += choice["token_ids"]
                    arrivals.append(Arrival(event.at - sent_at, len(choice["token_ids"])))
        if chunk["usage"]["prompt_tokens"] != len(ask.token_ids):
            raise RuntimeError(
                f"the service read {chunk['usage']['prompt_tokens']} prompt tokens; {len(ask.token_ids)} were meant"
            )
        guessed = chunk["metrics"]["speculative_decoding"]
        return Answer(
            token_ids=token_ids,
            arrivals=arrivals,
            num_drafts=guessed["num_spec_steps"],
            num_accepted=guessed["num_accepted_draft_tokens"],
        )

    def cpu_seconds(self) -> float | None:
        """Processor time of the front so far, without the engine's."""
        return cpu_seconds(self._server.pid)


class ForerunMethod:
    """The service with one speculation config. Its requests share a cache salt, and so see each other's texts alone."""

    name = "forerun"

    def __init__(
        self,
        service: ForerunService,
        method: str,
        speculation: dict[str, Any],
        *,
        temperature: float,
        salt: str,
        top_p: float = 1.0,
    ) -> None:
        self.method = method
        self.precision = service.description
        self._service = service
        self._speculation = speculation
        self._temperature = temperature
        self._top_p = top_p
        self._salt = salt

    async def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        before = self._service.cpu_seconds()
        answers = await asyncio.gather(*(self._chat(ask, ignore_eos=True) for ask in asks))
        after = self._service.cpu_seconds()
        share = None if before is None or after is None else (after - before) / len(asks)
        return [msgspec.structs.replace(answer, cpu_seconds=share) for answer in answers]

    async def natural_answer(self, ask: Ask) -> Answer:
        """One that ends where the model ends it, after `num_tokens` at the latest."""
        return await self._chat(ask, ignore_eos=False)

    async def _chat(self, ask: Ask, *, ignore_eos: bool) -> Answer:
        return await self._service.chat(
            ask,
            self._speculation,
            temperature=self._temperature,
            top_p=self._top_p,
            salt=self._salt,
            ignore_eos=ignore_eos,
        )


def serve_command(flags: Sequence[str]) -> Command:
    """What starts the service at a port."""
    return lambda port: [sys.executable, "-m", "service", *flags, "--port", str(port)]


@asynccontextmanager
async def running_service(arguments: Sequence[str], session: aiohttp.ClientSession) -> AsyncIterator[ForerunService]:
    """Start the service as a user would, with further flags."""
    async with serving(serve_command(arguments), "/health/ready") as server:
        async with session.get(f"{server.url}/v1/models") as response:
            description = (await response.json())["data"][0]["description"]
        yield ForerunService(server, session, description)
