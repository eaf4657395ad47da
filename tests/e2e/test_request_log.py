"""The request log of a real service: it replays exactly, and a disk that is full or closed harms nobody."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speculation.recording import Recording, read_log
from tests.e2e.server import Server
from tests.tiny_folder import write_tiny_folder

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "min_n": 1, "max_n": 2}
FLAGS = ("--device", "cpu", "--num-blocks", "64", "--audit-share", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[Server]:
    """A service with a tiny model, which records its requests and audits each."""
    with Server(tmp_path / "stderr", "--model", str(model), "--request-log", str(tmp_path / "log.jsonl"), *FLAGS) as it:
        yield it


def complete(server: Server, prompt: list[int], **fields: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "temperature": 0, "speculation": NGRAM, **fields}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode())  # noqa: S310 - our own
    with urllib.request.urlopen(request, timeout=120) as response:  # noqa: S310 - our own address
        return json.loads(response.read())


def recordings_of(path: Path, count: int) -> list[Recording]:
    """What is in the log as soon as it has so many lines."""
    deadline = time.monotonic() + 60
    while path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return list(read_log(path))


def prompts_of(path: Path) -> list[list[int]]:
    return [recording.prompt_token_ids for recording in read_log(path)]


def simulate(*logs: Path, out: Path) -> Any:
    """What `forerun simulate` says of the config that the requests had."""
    flags = [flag for log in logs for flag in ("--log", str(log))]
    command = [sys.executable, "-c", "from service.__main__ import main; raise SystemExit(main())", "simulate"]
    command += [*flags, "--config", json.dumps(NGRAM), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())["rows"][1]


def test_what_was_recorded_replays_exactly(server: Server, tmp_path: Path) -> None:
    """Two requests, greedy and sampled, guess in the replay as they did in the service; audit runs are not in it."""
    prompts = [[3, 4, 5, 3, 4], [9, 8, 9, 8, 7]]
    answers = [complete(server, prompts[0]), complete(server, prompts[1], temperature=0.7, seed=3, n=2)]
    log = tmp_path / "log.jsonl"
    found = recordings_of(log, 3)
    assert [recording.prompt_token_ids for recording in found] == [prompts[0], prompts[1], prompts[1]]
    assert all(len(recording.output_token_ids) == 40 for recording in found)
    deadline = time.monotonic() + 60
    while server.metric("forerun_audited_requests_total") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    metrics = [answer["metrics"]["speculative_decoding"] for answer in answers]
    row = simulate(log, out=tmp_path / "out.json")
    assert row["sequences"] == 3
    assert row["tokens"] == 120
    assert row["drafts"] == sum(each["num_spec_steps"] for each in metrics) > 0
    assert row["draft_tokens"] == sum(each["num_draft_tokens"] for each in metrics)
    num_accepted = sum(each["num_accepted_draft_tokens"] for each in metrics)
    assert row["acceptance_rate"] == round(num_accepted / row["draft_tokens"], 3)
    assert simulate(log, log, out=tmp_path / "out.json")["sequences"] == 6


def test_a_full_disk_is_told_once_and_harms_no_request(server: Server, tmp_path: Path) -> None:
    """While nothing can be written requests are answered, with one warning; afterwards they are recorded again."""
    log, stderr = tmp_path / "log.jsonl", tmp_path / "stderr"
    complete(server, [3, 4, 5])
    assert len(recordings_of(log, 1)) == 1
    # No file of the process may grow beyond a size that its messages do not need, and that the request log has.
    most = 1 << 18
    hard = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))[1]
    with log.open("ab") as file:
        file.write(b" " * (most - log.stat().st_size - 10) + b"\n")
    for _ in range(3):
        assert complete(server, [3, 4, 5])["usage"]["completion_tokens"] == 40
    deadline = time.monotonic() + 60
    while "requests are not recorded" not in server.log():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
    # Requests are written behind their answers: those of a moment ago may still be waiting, and are recorded then.
    while "requests are recorded again" not in server.log():
        assert time.monotonic() < deadline
        complete(server, [6, 7])
    while (found := prompts_of(log))[-1] != [6, 7]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert all(prompt == [3, 4, 5] for prompt in found[: found.index([6, 7])])
    assert stderr.read_text().count("requests are not recorded") == 1


@pytest.mark.parametrize("place", ["missing/log.jsonl", "."])
def test_a_path_that_cannot_be_written_is_refused_at_start(place: str, model: Path, tmp_path: Path) -> None:
    """The service ends with status 1 and a line that names the setting and what is wrong with it."""
    command = [sys.executable, "-m", "service", "--port", "0", "--model", str(model), "--request-log"]
    done = subprocess.run([*command, str(tmp_path / place)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "request_log is" in done.stderr
    assert "cannot be written" in done.stderr
