"""Loops that one bad item does not end, and ends that are seen."""

from __future__ import annotations

import asyncio
from pathlib import Path

from structlog.testing import capture_logs

from service.background import run_forever, start_task
from service.request_log import RequestLog, Transcript
from tests.service.pool.conftest import output, submit


async def test_a_loop_survives_its_steps_and_says_so_once() -> None:
    """Steps that raise are followed by others; the same failure is one line with the task's name, and so is its end."""
    failures = [ValueError("a"), ValueError("a"), KeyError("b"), None, None, ValueError("a")]
    done = asyncio.Event()

    async def step() -> None:
        if not failures:
            done.set()
            return
        failure = failures.pop(0)
        if failure is not None:
            raise failure

    with capture_logs() as logs:
        task = start_task("the loop", run_forever("the loop", step, 0.0))
        await asyncio.wait_for(done.wait(), 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert [entry["task"] for entry in logs] == ["the loop"] * 5
    assert [entry["log_level"] for entry in logs] == ["error", "error", "info", "error", "info"]


async def test_a_task_that_ends_is_an_error_in_the_log() -> None:
    """A background task that returns or raises is logged by name; one that is cancelled is not."""

    async def work(error: Exception | None) -> None:
        if error is not None:
            raise error

    with capture_logs() as logs:
        tasks = [start_task("returns", work(None)), start_task("raises", work(ValueError("x")))]
        cancelled = start_task("cancelled", work(None))
        cancelled.cancel()
        await asyncio.gather(*tasks, cancelled, return_exceptions=True)
        await asyncio.sleep(0)
    assert sorted((entry["task"], entry["log_level"]) for entry in logs) == [("raises", "error"), ("returns", "error")]


def test_a_request_that_cannot_be_written_does_not_end_the_log(tmp_path: Path) -> None:
    """The thread of the request log leaves out what it cannot write, and writes what comes behind it."""
    path = tmp_path / "requests.jsonl"
    log = RequestLog(str(path), 1 << 20)
    broken, whole = Transcript([submit("a")]), Transcript([submit("b")])
    whole.add(output("b", 7))
    broken._token_ids.clear()
    with capture_logs() as logs:
        log.keep(broken)
        log.keep(whole)
        log.close()
    assert len(path.read_text().splitlines()) == 1
    assert logs[0]["event"] == "requests are not recorded"
