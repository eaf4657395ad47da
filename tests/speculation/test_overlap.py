"""Steps that are reported while the next one runs: the same tokens, told in the same order, and as soon as may be."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch

from draft.config import NgramConfig
from draft.ngram import NgramProposer
from draft.proposer import Proposer
from draft.roster import Roster
from speculation.controller import DraftLengthController
from speculation.cost_model import StepCostModel
from speculation.engine import Engine, LaunchedStep
from speculation.framing import FrameReader, encode_frame
from speculation.messages import Abort, Command, Event, SequenceOutput, StepOutputs, Submit
from speculation.step_report import StepResult
from speculation.worker import Worker
from tests.speculation.running import SCRIPTED, plain_loop, request_of, truth
from tests.speculation.scripted import Scripted, bushy
from tests.speculation.token_runner import VOCAB_SIZE, TokenRunner


class DeviceRunner(TokenRunner):
    """Says that it computes on a device of its own."""

    device = torch.device("cuda")


class SlowEngine(Engine):
    """Settles a step when it is allowed to, as if a device took its time."""

    permits: threading.Semaphore | None = None

    def settle(self, step: LaunchedStep) -> StepResult:
        if self.permits is not None:
            self.permits.acquire()
        return super().settle(step)


def engine_of(runner: TokenRunner, proposer: Proposer | None = None) -> SlowEngine:
    proposers: dict[str, Proposer] = {"ngram": NgramProposer()}
    if proposer is not None:
        proposers["draft_model"] = proposer
    return SlowEngine(
        runner,
        Roster(proposers),
        DraftLengthController(StepCostModel()),
        model_fingerprint="integers",
        default_config=NgramConfig(num_speculative_tokens=3),
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_waiting=100,
        clock=lambda: 0.0,
    )


def one_by_one(engine: Engine) -> Iterator[list[SequenceOutput]]:
    """Each step reported before the next is launched."""
    while engine.has_work:
        yield engine.step()


def overlapped(engine: Engine) -> Iterator[list[SequenceOutput]]:
    """Each step reported when the next one has been launched."""
    result: StepResult | None = None
    while engine.has_work:
        step = engine.launch()
        if result is not None:
            yield engine.report(result)
        result = engine.settle(step)
        engine.check()
    if result is not None:
        yield engine.report(result)


def without_times(output: SequenceOutput) -> SequenceOutput:
    """What drafting took is measured, and no two runs take the same."""
    if output.metrics is None:
        return output
    return msgspec.structs.replace(output, metrics=msgspec.structs.replace(output.metrics, saved_seconds=0.0))


def test_overlapped_steps_say_the_same_in_the_same_order() -> None:
    """Six sequences with trees, lookups, penalties, logprobs and preemptions: every output equal, figures included."""

    def outputs(drive: Callable[[Engine], Iterator[list[SequenceOutput]]]) -> dict[str, list[SequenceOutput]]:
        rng = random.Random(3)
        engine = engine_of(TokenRunner(18, 4), Scripted("bushy", bushy(truth, VOCAB_SIZE, random.Random(5))))
        requests = [
            request_of(
                str(i),
                [rng.randrange(VOCAB_SIZE) for _ in range(4 + 5 * (i % 3))],
                SCRIPTED if i % 2 else None,
                temperature=1.0,
                seed=i,
                max_tokens=18 + i,
                logprobs=2 if i == 1 else None,
                frequency_penalty=0.4 if i == 2 else 0.0,
            )
            for i in range(6)
        ]
        requests.append(msgspec.structs.replace(request_of("scored", [1, 2, 3, 4, 5]), prompt_logprobs=1))
        for request in requests:
            assert engine.submit(request) is None
        found: dict[str, list[SequenceOutput]] = {request.request_id: [] for request in requests}
        for step in drive(engine):
            for output in step:
                found[output.request_id].append(without_times(output))
        for request in requests:
            said = [token for output in found[request.request_id] for token in output.token_ids]
            assert said == plain_loop(request)
        assert engine.stats().counters["preemptions"] > 0
        assert engine.pool.num_in_use == 0
        return found

    assert outputs(overlapped) == outputs(one_by_one)


class Client:
    """A worker on a device of its own, whose steps are settled one permit at a time, and the front's end of it."""

    def __init__(self) -> None:
        self.runner = DeviceRunner()
        engine = engine_of(self.runner)
        self.permits = engine.permits = threading.Semaphore(0)
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(60)
        self._worker = Worker(theirs, engine, check_invariants=True, heartbeat_seconds=600)
        self._thread = threading.Thread(target=self._worker.run, daemon=True)
        self._reader: FrameReader[Event] = FrameReader(Event)
        self._outputs: list[SequenceOutput] = []
        self._thread.start()

    def send(self, command: Command) -> None:
        self._socket.sendall(encode_frame(command))

    def wait_until_queued(self) -> None:
        """What was sent lies before the worker, which is busy."""
        while self._worker._commands.empty():
            time.sleep(0.001)

    def output(self) -> SequenceOutput:
        """The next one, whose step is over."""
        while not self._outputs:
            for event in self._reader.feed(self._socket.recv(1 << 16)):
                if isinstance(event, StepOutputs):
                    self._outputs += event.outputs
        return self._outputs.pop(0)

    def close(self) -> None:
        self.permits.release(1000)
        self._socket.shutdown(socket.SHUT_WR)
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._socket.close()


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


def sampled(num_tokens: int) -> Submit:
    return request_of("a", [1, 2, 3], None, temperature=1.0, seed=1, max_tokens=num_tokens)


def test_a_step_is_told_while_the_device_works_on_the_next(client: Client) -> None:
    """When the first step's tokens arrive, the second has been launched and nobody has waited for it."""
    client.send(sampled(30))
    client.permits.release()
    first = client.output()
    assert client.runner.num_forwards == 2
    assert first.token_ids == plain_loop(sampled(30))[:1]


def test_the_last_step_is_told_at_once(client: Client) -> None:
    """Nothing is held back behind which no step comes."""
    client.send(sampled(1))
    client.permits.release()
    assert client.output().finish_reason == "length"
    assert client.runner.num_forwards == 1


def test_an_abort_is_told_behind_the_tokens(client: Client) -> None:
    """Every token of an aborted sequence comes before its end, whose figures count the steps that brought them."""
    client.send(sampled(200))
    client.permits.release()
    first = client.output()
    client.send(Abort("a"))
    client.wait_until_queued()
    client.permits.release()
    second, end = client.output(), client.output()
    assert [*first.token_ids, *second.token_ids] == plain_loop(sampled(200))[: 1 + len(second.token_ids)]
    assert end.finish_reason == "abort"
    assert end.metrics is not None
    assert end.metrics.num_steps == 2
