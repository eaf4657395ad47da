"""Messages with extreme values for a stand-alone engine, from a peer that has passed the handshake and lies."""

from __future__ import annotations

import asyncio
import random
import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.extremes import COMMON, MSGPACK_ONLY, mutations
from benchmarks.fuzz_requests import SPECULATION
from benchmarks.idle import descendants
from service.pool.handshake import join
from speculation.framing import FrameReader
from speculation.messages import Event, Ready, Rejected, Stats, StepOutputs
from tests.redis_server import RedisServer

ANSWER_SECONDS = 60.0
"""Longest wait for the end of a sequence."""
ABORT_SECONDS = 2.0
"""A sequence that still runs then is aborted: some extreme values ask for long outputs, which is no fault."""
START_SECONDS = 300.0

SUBMIT: dict[str, Any] = {
    "type": "submit",
    "request_id": "fuzzed",
    "prompt_token_ids": [5, 6, 7, 8],
    "sampling": {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.01,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": {5: 1.0},
        "seed": 7,
        "max_tokens": 2,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [2],
        "logprobs": 2,
    },
    "speculation": {"method": "ngram", "num_speculative_tokens": 2, "min_n": 1, "max_n": 2},
    "priority": 0,
    "cache_salt": "salt",
    "prompt_logprobs": 1,
    "prediction_token_ids": [5, 6, 7, 8, 9],
    "output_token_ids": [9],
}
ABORT: dict[str, Any] = {"type": "abort", "request_id": "fuzzed"}
PREFER: dict[str, Any] = {"type": "prefer", "identities": [b"0" * 32]}
CANARY: dict[str, Any] = {
    "type": "submit",
    "request_id": "canary",
    "prompt_token_ids": [5, 6, 7, 8, 9, 10],
    "sampling": {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True},
}
KEYS = (0, -1, 2**31, 2**63, 2**64 - 1, -(2**63), "5", "x", None, 1.5, True, b"5")
"""Keys of a map whose keys are token ids."""


def engine_messages() -> Iterator[tuple[bytes, str]]:
    """Every field of every message with every extreme value, and frames that are no message. `Drain` is left out."""
    values = (*COMMON, *MSGPACK_ONLY)
    for template in (SUBMIT, *({**SUBMIT, "speculation": each} for each in SPECULATION), ABORT, PREFER):
        for mutation in mutations(template, values):
            yield _packed(mutation.body), mutation.description
    for key in KEYS:
        sampling = {**SUBMIT["sampling"], "logit_bias": {key: 1.0}}
        yield _packed({**SUBMIT, "sampling": sampling}), f"logit_bias key {key!r}"
    for count in (4_000, 100_000):
        for name in ("prompt_token_ids", "prediction_token_ids", "output_token_ids"):
            yield _packed({**SUBMIT, name: [5] * count}), f"{name} of {count} tokens"
    yield _packed({**PREFER, "identities": [bytes([index % 256]) * 32 for index in range(50_000)]}), "50,000 identities"
    whole = _packed(SUBMIT)
    for cut in range(0, len(whole), 7):
        yield whole[:cut], f"the first {cut} bytes of a message"
        yield whole[:cut] + bytes([whole[cut] ^ 0x55]) + whole[cut + 1 :], f"byte {cut} flipped"
    for event in ("ready", "step", "rejected", "stats", "blocks", "alive", "hello", "nothing"):
        yield _packed({**SUBMIT, "type": event}), f"type {event}"


def _packed(body: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(body)
    except (OverflowError, UnicodeEncodeError):  # a number or a half of a character that the format does not have
        return b"\xc1"


class EngineFault(Exception):
    """The engine, or the process around it, did what it must not; the message says what."""


class Peer:
    """A connection to a stand-alone engine, as a front has one, that sends whatever bytes it is given."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = FrameReader[Event](Event)
        self._events: list[Event] = []
        self.stats: Stats | None = None
        """The newest that the engine sent."""

    @classmethod
    async def connect(cls, port: int) -> Peer:
        """Pass the handshake and wait for `Ready`. Raises `EngineFault` if it does not come."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        await join(reader, writer, None)
        peer = cls(reader, writer)
        event = await peer.next_event(ANSWER_SECONDS)
        if not isinstance(event, Ready):
            raise EngineFault(f"a new connection got {type(event).__name__} in place of Ready")
        return peer

    def send(self, payload: bytes) -> None:
        self._writer.write(struct.pack("<I", len(payload)) + payload)

    async def next_event(self, seconds: float) -> Event | None:
        """The next event; None when the engine has closed the connection. Raises TimeoutError.

        A connection that is closed before everything sent on it was read ends with a reset in place of an end of file.
        """
        async with asyncio.timeout(seconds):
            while not self._events:
                try:
                    data = await self._reader.read(1 << 16)
                except ConnectionResetError:
                    return None
                if not data:
                    return None
                self._events += self._frames.feed(data)
        event = self._events.pop(0)
        if isinstance(event, Stats):
            self.stats = event
        return event

    async def outcome(self) -> tuple[str, list[int]]:
        """How the newest sequence ended, and its tokens: a finish reason, "rejected", or "closed".

        One that takes long is aborted. Raises `EngineFault` if neither it nor its connection ends.
        """
        loop = asyncio.get_running_loop()
        started, is_aborted, tokens = loop.time(), False, list[int]()
        while loop.time() - started < ANSWER_SECONDS:
            with suppress(TimeoutError):
                match await self.next_event(ABORT_SECONDS):
                    case None:
                        return "closed", tokens
                    case Rejected(code=code, message=message):
                        if not message:
                            raise EngineFault(f"a refusal ({code}) without a reason")
                        return "rejected", tokens
                    case StepOutputs(outputs):
                        for output in outputs:
                            tokens += output.token_ids
                            if output.finish_reason is not None:
                                return output.finish_reason, tokens
                            if not is_aborted and loop.time() - started > ABORT_SECONDS:
                                is_aborted = True
                                self.send(_packed({"type": "abort", "request_id": output.request_id}))
        raise EngineFault(f"a sequence neither ended nor was refused within {ANSWER_SECONDS:g} s")

    async def close(self) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


class FuzzedEngine:
    """A stand-alone engine process, what it answers to extreme messages, and whether it stayed the same."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process = process
        self._port = port
        self._peer: Peer | None = None
        self._pids = sorted(descendants(process.pid))
        self._expected: list[int] | None = None
        self.num_messages = 0
        self.outcomes: dict[str, int] = {}
        """How often messages ended in each way."""

    async def send(self, payload: bytes) -> None:
        """Send one message and wait for what it comes to. Raises `EngineFault`."""
        if self._peer is None:
            self._peer = await Peer.connect(self._port)
        self._peer.send(payload)
        is_submit = _is_submit(payload)
        if not is_submit:  # it has no answer: what is asked behind it must be answered as ever
            self._peer.send(_packed(CANARY))
        outcome, tokens = await self._peer.outcome()
        if outcome == "closed":
            await self._peer.close()
            self._peer = None
            self._check_processes()
        elif not is_submit:
            self._compare(tokens)
        self.num_messages += 1
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def reset(self) -> None:
        """Go on after a fault: on a new connection, with the processes there are now."""
        self._peer = None
        self._pids = sorted(descendants(self._process.pid))

    async def check(self) -> None:
        """Raise `EngineFault` if a process was replaced, another answer comes, or a sequence or block is still held."""
        self._check_processes()
        peer = await Peer.connect(self._port)
        try:
            peer.send(_packed(CANARY))
            outcome, tokens = await peer.outcome()
            if outcome != "length":
                raise EngineFault(f"an ordinary request ended with {outcome!r}")
            self._compare(tokens)
            async with asyncio.timeout(ANSWER_SECONDS):
                while peer.stats is None or _is_busy(peer.stats):
                    await peer.next_event(ANSWER_SECONDS)
        except TimeoutError:
            raise EngineFault(f"sequences or blocks are left over: {peer.stats}") from None
        finally:
            await peer.close()

    def _check_processes(self) -> None:
        if self._process.returncode is not None:
            raise EngineFault(f"the engine's process ended with {self._process.returncode}")
        if sorted(descendants(self._process.pid)) != self._pids:
            raise EngineFault("the engine's worker died and was replaced")

    def _compare(self, tokens: Sequence[int]) -> None:
        if self._expected is None:
            self._expected = list(tokens)
        if list(tokens) != self._expected:
            raise EngineFault(f"an ordinary greedy request got {tokens}; before it got {self._expected}")


def _is_submit(payload: bytes) -> bool:
    """Whether the engine must answer: the message is a submit, or the connection ends."""
    try:
        tree = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, ValueError):
        return True
    return not (isinstance(tree, dict) and any(tree.get("type") == each for each in ("abort", "prefer")))


def _is_busy(stats: Stats) -> bool:
    return bool(stats.num_running or stats.num_waiting or stats.blocks_in_use)


def sampled_messages(seed: int) -> list[tuple[bytes, str]]:
    """All messages in a random order."""
    found = list(engine_messages())
    random.Random(seed).shuffle(found)
    return found


@asynccontextmanager
async def fuzzed_engine(flags: Sequence[str]) -> AsyncIterator[FuzzedEngine]:
    """A stand-alone engine beside a Redis of its own; both are gone at the end."""
    with tempfile.TemporaryDirectory(prefix="forerun-fuzz-") as folder, tempfile.TemporaryFile() as log:
        redis = RedisServer(Path(folder))
        command = [sys.executable, "-c", "import sys; from service.__main__ import main; sys.exit(main())", "engine"]
        command += ["--listen", "127.0.0.1:0", "--store", redis.url, *flags]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=log)
        try:
            assert process.stdout is not None
            async with asyncio.timeout(START_SECONDS):
                line = (await process.stdout.readline()).decode()
            if "serves at" not in line:
                log.seek(0)
                raise EngineFault(f"the engine did not start: {log.read().decode(errors='replace')[-2000:]}")
            yield FuzzedEngine(process, int(line.rpartition(":")[2]))
        finally:
            if process.returncode is None:
                process.terminate()
                with suppress(TimeoutError):
                    async with asyncio.timeout(20.0):
                        await process.wait()
            if process.returncode is None:
                process.kill()
            await process.wait()
            redis.kill()
