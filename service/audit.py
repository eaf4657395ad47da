"""The exactness audit: finished requests are run again without speculation while nobody waits, and tokens compared."""

from __future__ import annotations

import asyncio
import math
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import structlog

from service.background import run_forever
from service.engine_client import EngineRejectedError, EngineUnavailableError, OutputStream
from service.experiments.manager import Assignment, Experiments
from speculation.messages import NoSpeculation, SequenceOutput, Submit, TokenLogprob

MAX_WAITING_BYTES = 1 << 20
"""Of requests that wait to be run again, prompts included. The oldest make room."""
RECORD_BYTES = 512
"""Taken by one that waits, beside its message."""
MAX_DIVERGENCES = 32
"""How many are shown, newest first; all are counted."""
MAX_ATTEMPTS = 5
"""How often a run may be broken off because somebody came."""
LOOK_SECONDS = 0.1
QUIET_LOOKS = 3
"""Nobody waits when it was so at so many looks in a row."""
LOWEST_PRIORITY = 1_000_000
"""Below what any client may ask for."""
NUM_ALTERNATIVES = 10

_log = structlog.get_logger("forerun.audit")


class Client(Protocol):
    """Who runs sequences."""

    def submit(self, submits: Sequence[Submit], *, is_internal: bool) -> OutputStream: ...


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's tokens were not those of plain decoding."""

    position: int
    """In the answer, from 0."""
    token_id: int | None
    """What the client got; None where its answer had ended."""
    plain_token_id: int | None
    """What plain decoding gives; None where it had ended."""
    logit_gap: float | None
    """The target's logit of the plain token less that of the client's; None if that is not among the ten most likely.
    Near 0 it is rounding that decided."""


class FoundDivergence(Divergence, frozen=True, kw_only=True):
    """A divergence, and whose it was."""

    generation: str
    method: str
    experiment: str | None
    arm: str | None
    found_at: float
    """Seconds since the epoch."""


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/audit: this front's audit since its start."""

    share: float
    """Of finished requests with speculation that are taken."""
    audited: int
    diverged: int
    waiting: int
    """Requests that are to be run again when nobody waits."""
    dropped: int
    """Requests that were taken and could not be run again: for want of room, or because somebody always came."""
    divergences: list[FoundDivergence]


class Run(msgspec.Struct, frozen=True):
    """A sequence as it was asked for, and the tokens it gave."""

    submit: Submit
    token_ids: list[int]

    def plain(self) -> Submit:
        """The same sequence without speculation, computed from its first token on.

        Its cache salt is used once: it finds nothing that the first run left behind, and nobody finds what it leaves.
        """
        audit_id = f"audit-{uuid.uuid4().hex}"
        num_tokens = len(self.token_ids)
        sampling = msgspec.structs.replace(
            self.submit.sampling,
            max_tokens=num_tokens,
            min_tokens=min(self.submit.sampling.min_tokens, num_tokens),
            logprobs=NUM_ALTERNATIVES,
        )
        return Submit(
            request_id=audit_id,
            prompt_token_ids=self.submit.prompt_token_ids,
            sampling=sampling,
            speculation=NoSpeculation(),
            priority=LOWEST_PRIORITY,
            cache_salt=audit_id,
        )


@dataclass(slots=True, eq=False)
class Sample:
    """One sequence of a request that is being answered, and what it has given so far."""

    submit: Submit
    method: str
    assignment: Assignment | None
    token_ids: list[int] = field(default_factory=list)

    def add(self, output: SequenceOutput) -> None:
        """What the engine said of the request; only of the sampled choice it is kept."""
        if output.request_id == self.submit.request_id:
            self.token_ids += output.token_ids


@dataclass(slots=True, eq=False)
class WaitingRun:
    """A run that is to be repeated. It may wait for hours, and is kept as a message: a tenth of the memory."""

    message: bytes
    """A `Run`, in MessagePack."""
    method: str
    assignment: Assignment | None
    num_attempts: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.message) + RECORD_BYTES


_DECODER = msgspec.msgpack.Decoder(Run)


class Auditor:
    """Chooses requests, and runs them again one at a time. `run` is its whole life."""

    def __init__(
        self,
        client: Client,
        experiments: Experiments,
        *,
        share: float,
        is_quiet: Callable[[int], bool],
        on_audit: Callable[[bool], None],
    ) -> None:
        """`is_quiet` says whether the service serves and at most so many sequences are live; `on_audit` is told of
        each request that was compared whether it diverged.
        """
        self._client = client
        self._experiments = experiments
        self._share = share
        self._is_quiet = is_quiet
        self._on_audit = on_audit
        self._waiting: deque[WaitingRun] = deque()
        self._num_waiting_bytes = 0
        self._has_work = asyncio.Event()
        self._num_audited = self._num_diverged = self._num_dropped = 0
        self._divergences: deque[FoundDivergence] = deque(maxlen=MAX_DIVERGENCES)

    @property
    def report(self) -> AuditReport:
        """What was found so far."""
        return AuditReport(
            share=self._share,
            audited=self._num_audited,
            diverged=self._num_diverged,
            waiting=len(self._waiting),
            dropped=self._num_dropped,
            divergences=list(self._divergences),
        )

    def sample(self, submits: Sequence[Submit], method: str, assignment: Assignment | None) -> Sample | None:
        """One choice of a request that begins, if it is to be audited. There is nothing to audit in plain decoding."""
        if method == NoSpeculation.__struct_config__.tag or random.random() >= self._share:
            return None
        return Sample(random.choice(submits), method, assignment)

    def keep(self, sample: Sample) -> None:
        """The request was answered to its end: it waits for its second run."""
        if sample.token_ids:
            message = msgspec.msgpack.encode(Run(sample.submit, sample.token_ids))
            self._append(WaitingRun(message, sample.method, sample.assignment))

    def _append(self, waiting: WaitingRun) -> None:
        self._waiting.append(waiting)
        self._num_waiting_bytes += waiting.num_bytes
        while self._num_waiting_bytes > MAX_WAITING_BYTES:
            self._pop()
            self._num_dropped += 1
        self._has_work.set()

    def _pop(self) -> WaitingRun:
        waiting = self._waiting.popleft()
        self._num_waiting_bytes -= waiting.num_bytes
        return waiting

    async def run(self) -> None:
        """Audit whenever nobody waits, until cancelled."""
        await run_forever("audit", self._audit_next, 0.0)

    async def _audit_next(self) -> None:
        """Run the oldest request again as soon as nobody waits. One that raises is not tried again."""
        await self._has_work.wait()
        await self._quiet()
        if not self._waiting:
            self._has_work.clear()
            return
        waiting = self._pop()
        run = _DECODER.decode(waiting.message)
        outputs = await self._run_plain(run)
        waiting.num_attempts += 1
        if outputs is not None:
            self._conclude(waiting, run, outputs)
        elif waiting.num_attempts < MAX_ATTEMPTS:
            self._append(waiting)
        else:
            self._num_dropped += 1

    async def _quiet(self) -> None:
        num_looks = 0
        while num_looks < QUIET_LOOKS:
            await asyncio.sleep(LOOK_SECONDS)
            num_looks = num_looks + 1 if self._is_quiet(0) else 0

    async def _run_plain(self, run: Run) -> list[SequenceOutput] | None:
        """The second run; None if it was broken off, because somebody came or the engine went."""
        outputs: list[SequenceOutput] = []
        try:
            async with self._client.submit([run.plain()], is_internal=True) as stream:
                while not stream.is_finished:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_SECONDS):
                            outputs += await stream.take()
                    if not self._is_quiet(1):
                        return None
        except (EngineUnavailableError, EngineRejectedError):
            return None
        return outputs

    def _conclude(self, waiting: WaitingRun, run: Run, outputs: Sequence[SequenceOutput]) -> None:
        plain = [token_id for output in outputs for token_id in output.token_ids]
        rows = [row for output in outputs for row in output.logprobs or ()]
        divergence = divergence_of(run.token_ids, plain, rows)
        self._num_audited += 1
        self._on_audit(divergence is not None)
        assignment = waiting.assignment
        if assignment is not None:
            self._experiments.observe_audit(assignment, diverged=divergence is not None)
        if divergence is None:
            return
        self._num_diverged += 1
        found = FoundDivergence(
            **msgspec.structs.asdict(divergence),
            generation=run.submit.request_id,
            method=waiting.method,
            experiment=None if assignment is None else assignment.experiment,
            arm=None if assignment is None else assignment.arm,
            found_at=time.time(),
        )
        self._divergences.appendleft(found)
        _log.error("tokens differ from plain decoding", **msgspec.structs.asdict(found))


def divergence_of(
    token_ids: Sequence[int], plain_token_ids: Sequence[int], rows: Sequence[TokenLogprob]
) -> Divergence | None:
    """The first place where two answers differ. `rows` are the logprobs of the plain one's tokens.

    At one place, logprobs differ as logits do.
    """
    both = min(len(token_ids), len(plain_token_ids))
    place = next((i for i in range(both) if token_ids[i] != plain_token_ids[i]), both)
    if place == max(len(token_ids), len(plain_token_ids)):
        return None
    ours, plain = (ids[place] if place < len(ids) else None for ids in (token_ids, plain_token_ids))
    gap: float | None = None
    if plain is not None and place < len(rows):
        row = rows[place]
        gap = next(
            (
                row.logprob - logprob
                for i, logprob in zip(row.top_token_ids, row.top_logprobs, strict=True)
                if i == ours
            ),
            None,
        )
    return Divergence(
        position=place,
        token_id=ours,
        plain_token_id=plain,
        logit_gap=gap if gap is not None and math.isfinite(gap) else None,
    )
