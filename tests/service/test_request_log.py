"""The request log: what is in it, what is not, and that it stays within its bound."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from service.request_log import LogFile, RecordingSettings
from service.settings import Settings
from speculation.recording import Recording, read_log
from tests.service.conftest import Service, StartService

PROMPT = [10, 11, 12, 13]


async def recordings_of(service: Service, path: Path, count: int) -> list[Recording]:
    """What the log holds when so many sequences have been written, half a minute later at most."""
    await service.until(lambda: path.read_bytes().count(b"\n") >= count)
    return list(read_log(path))


def test_nothing_is_recorded_unless_asked_for() -> None:
    """By default there is no request log."""
    assert Settings().recording.request_log is None


async def test_every_choice_of_a_request_is_a_line(start_service: StartService, tmp_path: Path) -> None:
    """Prompt, answer and predicted output are there as token ids, the stop token too."""
    path = tmp_path / "log.jsonl"
    service = await start_service(recording=RecordingSettings(request_log=str(path)))
    common = {"temperature": 0.5, "seed": 0, "return_token_ids": True, "max_tokens": 20}
    body = {**common, "prompt": [PROMPT, PROMPT[:2]], "n": 2}
    status, answer = await service.post("/v1/completions", body)
    assert status == 200
    found = await recordings_of(service, path, 4)
    shown = [choice["token_ids"] for choice in answer["choices"]]
    assert [recording.output_token_ids for recording in found] == [[*token_ids, 2] for token_ids in shown]
    assert [recording.prompt_token_ids for recording in found] == [PROMPT, PROMPT, PROMPT[:2], PROMPT[:2]]
    assert {recording.temperature for recording in found} == {0.5}
    chat = {"messages": [{"role": "user", "content": "fox"}], "prediction": {"type": "content", "content": "dog"}}
    await service.events("/v1/chat/completions", {**common, **chat})
    predicted = (await recordings_of(service, path, 5))[4]
    assert predicted.prediction_token_ids == service.front.model.tokenizer.encode("dog")
    assert path.stat().st_mode & 0o777 == 0o600


async def test_no_text_and_no_salt_is_in_it(start_service: StartService, tmp_path: Path) -> None:
    """Salts are replaced by names that say whether two are the same, and nothing else; text is nowhere."""
    path = tmp_path / "log.jsonl"
    service = await start_service(recording=RecordingSettings(request_log=str(path)))
    for salt in ("secret-a", "secret-b", "secret-a", None):
        body = {"prompt": "The quick brown fox", "max_tokens": 4, "user": "somebody", "cache_salt": salt}
        assert (await service.post("/v1/completions", body))[0] == 200
    salts = [recording.cache_salt for recording in await recordings_of(service, path, 4)]
    assert salts[0] == salts[2] != salts[1]
    assert salts[3] == ""
    content = path.read_text()
    assert not any(word in content for word in ("secret", "somebody", "quick"))


async def test_what_was_not_generated_is_not_recorded(start_service: StartService, tmp_path: Path) -> None:
    """A prompt that was only scored, a refused request, and one whose client left are not in it."""
    path = tmp_path / "log.jsonl"
    service = await start_service(recording=RecordingSettings(request_log=str(path)))
    scored = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
    assert (await service.post("/v1/completions", scored))[0] == 200
    assert (await service.post("/v1/completions", {"prompt": [5], "cache_salt": "refuse"}))[0] == 429
    body = {"prompt": [7], "max_tokens": 400, "ignore_eos": True, "cache_salt": "slow", "stream": True}
    async with service.client.post(f"{service.url}/v1/completions", json=body) as response:
        await response.content.readline()
    await service.until_idle()
    assert (await service.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4}))[0] == 200
    (only,) = await recordings_of(service, path, 1)
    assert only.prompt_token_ids == PROMPT


async def test_what_waits_is_written_at_the_end(start_service: StartService, tmp_path: Path) -> None:
    """When the service has stopped, every finished request is in the file, and another process may have it."""
    path = tmp_path / "log.jsonl"
    service = await start_service(recording=RecordingSettings(request_log=str(path)))
    bodies = [{"prompt": [10 + i], "max_tokens": 3} for i in range(20)]
    answers = await asyncio.gather(*(service.post("/v1/completions", body) for body in bodies))
    assert Counter(status for status, _ in answers) == {200: 20}
    await service.app.cleanup()
    assert sorted(recording.prompt_token_ids[0] for recording in read_log(path)) == list(range(10, 30))
    LogFile(path, 1 << 20).close()


def test_the_bound_holds(tmp_path: Path) -> None:
    """With half of the bound a new file begins; the file and the one before it never exceed it, and lines are whole."""
    path, old = tmp_path / "log", tmp_path / "log.1"
    log = LogFile(path, 1000)
    for number in range(200):
        log.append(b"%040d\n" % number)
        sizes = [file.stat().st_size for file in (path, old) if file.exists()]
        assert sum(sizes) <= 1000
    log.close()
    lines = [int(line) for file in (old, path) for line in file.read_text().splitlines()]
    assert lines == list(range(200 - len(lines), 200))
    assert len(lines) > 12
    assert {file.stat().st_mode & 0o777 for file in (path, old)} == {0o600}


def test_a_line_beyond_the_bound_is_left_out(tmp_path: Path) -> None:
    """What could never fit is not written, and displaces nothing."""
    log = LogFile(tmp_path / "log", 1000)
    log.append(b"short\n")
    log.append(b"x" * 600 + b"\n")
    log.append(b"other\n")
    log.close()
    assert (tmp_path / "log").read_bytes() == b"short\nother\n"


@pytest.mark.parametrize(("left", "kept"), [(b"", b""), (b"a\nb\n", b"a\nb\n"), (b"a\nhal", b"a\n"), (b"hal", b"")])
def test_a_half_line_of_a_dead_process_goes(tmp_path: Path, left: bytes, kept: bytes) -> None:
    """The log goes on behind the last whole line."""
    path = tmp_path / "log"
    path.write_bytes(left)
    log = LogFile(path, 1 << 20)
    log.append(b"new\n")
    log.close()
    assert path.read_bytes() == kept + b"new\n"


def test_two_services_do_not_write_one_file(tmp_path: Path) -> None:
    """The second is told so, and what the first writes stays whole."""
    first = LogFile(tmp_path / "log", 1 << 20)
    with pytest.raises(ValueError, match="another process writes it"):
        LogFile(tmp_path / "log", 1 << 20)
    first.append(b"line\n")
    first.close()
    assert (tmp_path / "log").read_bytes() == b"line\n"
