"""An engine without a model: `python -m tests.service.scripted_worker --socket PATH --settings JSON`.

It speaks the real protocol. The answer to a prompt is its ordinary tokens (ids above 2), turned by the seed, again and
again; after one round it ends with token 2, unless the request ignores that. With speculation it gives three tokens a
step, without one. What was generated elsewhere it takes as generated. A request's `cache_salt` can ask for trouble: see
`TROUBLE`.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from cache_store.hashing import block_hashes, root_hash
from speculation.framing import FrameReader, encode_frame
from speculation.messages import (
    Abort,
    BlocksChanged,
    Command,
    Drain,
    Event,
    NoSpeculation,
    Prefer,
    Ready,
    Rejected,
    RequestMetrics,
    SequenceOutput,
    Stats,
    StepOutputs,
    Submit,
    TokenLogprob,
)
from speculation.settings import EngineSettings
from target.sampling_defaults import read_sampling_defaults

EOS = 2
TROUBLE = {
    "die": "the engine kills itself at the second step of this request",
    "hang": "the engine stops, as by SIGSTOP, at the second step of this request",
    "slow": "a step takes 20 ms while this request runs",
    "refuse": "the request is rejected as overloaded",
    "invalid": "the request is rejected as invalid",
    "wrong": "with speculation the second token is not what it should be",
}
VOCABULARY = 512
HEARTBEAT_SECONDS = 0.2


@dataclass
class Running:
    """One sequence."""

    submit: Submit
    num_tokens: int = field(init=False)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.num_tokens = len(self.submit.output_token_ids)

    def step(self) -> SequenceOutput:
        sampling = self.submit.sampling
        pool = [token for token in self.submit.prompt_token_ids if token > EOS] or [3]
        guessed = 0 if isinstance(self.submit.speculation, NoSpeculation) else 2
        source = "prediction" if self.submit.prediction_token_ids else "ngram"
        first = self.num_steps == 0
        self.num_steps += 1
        token_ids: list[int] = []
        reason = stop = None
        while len(token_ids) <= guessed and reason is None:
            token = pool[(self.num_tokens + sampling.seed) % len(pool)]
            if self.num_tokens >= max(len(pool), sampling.min_tokens) and not sampling.ignore_eos:
                token = EOS
            if self.num_tokens == 1 and guessed and self.submit.cache_salt == "wrong":
                token ^= 1
            token_ids.append(token)
            self.num_tokens += 1
            if token in {EOS, *sampling.stop_token_ids} and not (token == EOS and sampling.ignore_eos):
                reason, stop = "stop", token
            elif self.num_tokens == sampling.max_tokens:
                reason = "length"
        return SequenceOutput(
            request_id=self.submit.request_id,
            token_ids=token_ids,
            sources=([source] * guessed + ["target"])[: len(token_ids)],
            logprobs=rows(token_ids, sampling.logprobs),
            prompt_logprobs=rows(self.submit.prompt_token_ids[1:], self.submit.prompt_logprobs) if first else None,
            finish_reason=reason,
            stop_token_id=stop,
            metrics=self.metrics() if reason else None,
        )

    def metrics(self) -> RequestMetrics:
        guesses = not isinstance(self.submit.speculation, NoSpeculation)
        return RequestMetrics(
            queue_seconds=0.001,
            prefill_seconds=0.002,
            num_prefill_chunks=1,
            num_cached_tokens=min(16, len(self.submit.prompt_token_ids) // 16 * 16),
            num_steps=self.num_steps,
            num_drafts=self.num_steps if guesses else 0,
            num_draft_tokens=2 * self.num_steps if guesses else 0,
            num_accepted_tokens=2 * self.num_steps if guesses else 0,
            num_prediction_tokens=3 * self.num_steps if self.submit.prediction_token_ids else 0,
            num_accepted_prediction_tokens=2 * self.num_steps if self.submit.prediction_token_ids else 0,
            accepted_histogram=[0, 0, self.num_steps] if guesses else [],
            skipped_drafts={} if guesses else {"disabled": self.num_steps},
            num_preemptions=0,
        )


def rows(token_ids: list[int], num_top: int | None) -> list[TokenLogprob] | None:
    if num_top is None:
        return None
    logprobs = [-0.5, *[-float("inf")] * num_top][:num_top]
    return [TokenLogprob(-0.5, 1, [token ^ i for i in range(num_top)], logprobs) for token in token_ids]


class ScriptedEngine:
    """Serves until the front is gone."""

    def __init__(self, connection: socket.socket, settings: EngineSettings, fingerprint: str) -> None:
        self._connection = connection
        self._settings = settings
        self._fingerprint = fingerprint
        self._running: dict[str, Running] = {}
        self._held: set[bytes] = set()
        self._draining = False
        self._num_steps = 0

    def run(self) -> None:
        self._send(
            Ready(
                model_fingerprint=self._fingerprint,
                model_folder=self._settings.model,
                max_model_len=self._settings.max_model_len or 256,
                vocab_size=VOCABULARY,
                num_blocks=self._settings.num_blocks or 1000,
                block_size=self._settings.block_size,
                methods=["none", "ngram"],
                max_waiting=self._settings.max_waiting,
                description="a script",
                max_num_seqs=self._settings.max_num_seqs,
                heartbeat_seconds=HEARTBEAT_SECONDS,
                sampling_defaults=read_sampling_defaults(Path(self._settings.model))[0],
            )
        )
        frames = FrameReader[Command](Command)
        while self._running or not self._draining:
            readable, _, _ = select.select([self._connection], [], [], 0 if self._running else HEARTBEAT_SECONDS)
            if readable:
                data = self._connection.recv(1 << 16)
                if not data:
                    return
                for command in frames.feed(data):
                    self._handle(command)
            if self._running:
                self._step()
            self._send(self._stats())

    def _handle(self, command: Command) -> None:
        match command:
            case Submit(request_id=request_id, cache_salt="refuse"):
                self._send(Rejected(request_id=request_id, code="overloaded", message="the queue is full"))
            case Submit(request_id=request_id, cache_salt="invalid"):
                self._send(Rejected(request_id=request_id, code="invalid", message="no", param="prompt"))
            case Submit():
                self._running[command.request_id] = Running(command)
                self._hold(command)
            case Abort(request_id):
                if (running := self._running.pop(request_id, None)) is not None:
                    ended = SequenceOutput(request_id=request_id, finish_reason="abort", metrics=running.metrics())
                    self._send(StepOutputs([ended]))
            case Drain():
                self._draining = True
            case Prefer():
                pass

    def _hold(self, submit: Submit) -> None:
        """Report the blocks of a prompt as held; none is ever evicted."""
        root = root_hash(self._fingerprint, submit.cache_salt)
        hashes = block_hashes(root, submit.prompt_token_ids, self._settings.block_size)
        stored = [each for each in hashes if each not in self._held]
        self._held.update(stored)
        if stored:
            self._send(BlocksChanged(stored, []))

    def _step(self) -> None:
        self._num_steps += 1
        salts = {running.submit.cache_salt for running in self._running.values()}
        for salt, number in (("die", signal.SIGKILL), ("hang", signal.SIGSTOP)):
            if any(running.submit.cache_salt == salt and running.num_steps for running in self._running.values()):
                os.kill(os.getpid(), number)
        if "slow" in salts:
            time.sleep(0.02)
        outputs = [running.step() for running in self._running.values()]
        for output in outputs:
            if output.finish_reason is not None:
                del self._running[output.request_id]
        self._send(StepOutputs(outputs))

    def _stats(self) -> Stats:
        return Stats(
            num_waiting=0,
            num_running=len(self._running),
            blocks_free=999 - len(self._running),
            blocks_cached=0,
            blocks_in_use=len(self._running),
            counters={"steps": float(self._num_steps), "drafts": 2.0, "drafts:ngram": 2.0},
            accepted_per_position=[2, 1],
            drafted_per_position=[2, 2],
            skipped_drafts={"disabled": 1},
            step_seconds_buckets=[self._num_steps] * 11,
            step_seconds_sum=0.001 * self._num_steps,
        )

    def _send(self, event: Event) -> None:
        self._connection.sendall(encode_frame(event))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--settings", required=True)
    parser.add_argument("--fingerprint", default="scripted")
    arguments = parser.parse_args()
    settings = msgspec.json.decode(arguments.settings, type=EngineSettings)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(arguments.socket)
        ScriptedEngine(connection, settings, arguments.fingerprint).run()


if __name__ == "__main__":
    main()
