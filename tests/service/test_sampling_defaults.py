"""Sampling defaults: the request's own value wins, then the settings', then the model's, then OpenAI's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from structlog.testing import capture_logs

from service.interpreter import Interpreter
from service.schema import ChatCompletionRequest, CompletionRequest, Received
from service.served_model import ServedModel
from service.settings import LimitSettings, SamplingSettings, ServerSettings, SettingsError, load_settings
from speculation.messages import Ready, SamplingDefaults, SamplingParams
from tests.service.conftest import StartService, byte_level_tokenizer, write_folder

MODEL = SamplingDefaults(
    temperature=0.2, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1, max_tokens=100, source="a file"
)


def params(folder: Path, defaults: SamplingDefaults, *, prompt: str | None = None, **fields: Any) -> SamplingParams:
    """What a request's fields become, with the defaults of a model."""
    ready = Ready(
        model_fingerprint="f",
        model_folder=str(folder),
        max_model_len=256,
        vocab_size=512,
        num_blocks=100,
        block_size=16,
        methods=["none"],
        max_waiting=4,
        description="",
    )
    served = ServedModel.load("m", folder, ready, defaults)
    if prompt is None:
        request: Any = msgspec.convert(
            {"messages": [{"role": "user", "content": "hi"}], **fields}, ChatCompletionRequest
        )
    else:
        request = msgspec.convert({"prompt": prompt, **fields}, CompletionRequest)
    return Interpreter(served, LimitSettings(), {}).generation("id", Received(request)).submits()[0].sampling


def test_the_model_s_values_are_the_defaults(model_folder: Path) -> None:
    """A request that sets nothing gets what the model recommends, on both routes."""
    for prompt in (None, "hi"):
        found = params(model_folder, MODEL, prompt=prompt)
        assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.2, 0.9, 40, 0.05)
        assert (found.repetition_penalty, found.max_tokens) == (1.1, 100)


def test_the_request_wins(model_folder: Path) -> None:
    """Every value of a request holds, also one that is 0 or the neutral one."""
    given: dict[str, Any] = {
        "temperature": 0,
        "top_p": 1,
        "top_k": 0,
        "min_p": 0,
        "repetition_penalty": 1,
        "max_tokens": 120,
    }
    found = params(model_folder, MODEL, **given)
    assert found == msgspec.structs.replace(
        found, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_tokens=120
    )


def test_without_either_it_is_openai_s(model_folder: Path) -> None:
    """Where model and settings say nothing, a request gets temperature 1 and the whole distribution."""
    found = params(model_folder, SamplingDefaults(), prompt="hi")
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (1.0, 1.0, 0, 0.0)
    assert (found.repetition_penalty, found.max_tokens) == (1.0, 16)


def test_a_default_length_is_shortened_to_what_fits(model_folder: Path) -> None:
    """A model's default of more tokens than the context has room for is no error."""
    found = params(model_folder, msgspec.structs.replace(MODEL, max_tokens=10_000))
    assert 200 < found.max_tokens < 256


def test_settings_replace_single_values_of_the_model() -> None:
    """What the settings name holds in place of the model's; the source names both."""
    found = SamplingSettings(temperature=0.7).over(MODEL)
    assert (found.temperature, found.top_p, found.source) == (0.7, 0.9, "a file, settings")
    assert SamplingSettings(top_k=5).over(SamplingDefaults()) == SamplingDefaults(top_k=5, source="settings")
    assert SamplingSettings().over(MODEL) == MODEL


def test_settings_are_read_from_file_and_flags(tmp_path: Path) -> None:
    """`[sampling]` is a table of the settings file and flags; values out of range are errors that name the flag."""
    file = tmp_path / "settings.toml"
    file.write_text("[sampling]\ntemperature = 0.5\n")
    settings = load_settings(["--config", str(file), "--top-p", "0.8"], {})
    assert (settings.sampling.temperature, settings.sampling.top_p) == (0.5, 0.8)
    assert load_settings(["--config", str(file), "--temperature", "none"], {}).sampling.temperature is None
    with pytest.raises(SettingsError, match="--temperature"):
        load_settings(["--temperature", "3"], {})
    with pytest.raises(SettingsError, match="generation_config"):
        load_settings(["--generation-config", "vllm"], {})


@pytest.mark.parametrize("generation_config", ["auto", "none"])
async def test_a_service_says_once_what_holds(
    tmp_path: Path, start_service: StartService, generation_config: Literal["auto", "none"]
) -> None:
    """The models route shows what holds, the log says it once, and `--generation-config none` turns it off."""
    folder = write_folder(tmp_path / "model", byte_level_tokenizer())
    (folder / "generation_config.json").write_text('{"temperature": 0.2, "top_p": 0.9}')
    with capture_logs() as logs:
        service = await start_service(server=ServerSettings(generation_config=generation_config), model=str(folder))
    _, body = await service.get("/v1/models")
    lines = [entry for entry in logs if entry["event"] == "sampling defaults"]
    if generation_config == "none":
        assert (body["data"][0]["sampling_defaults"], lines) == ({}, [])
    else:
        expected = {"temperature": 0.2, "top_p": 0.9, "source": "generation_config.json"}
        assert body["data"][0]["sampling_defaults"] == expected
        assert len(lines) == 1


async def test_large_requests_get_the_same(tmp_path: Path, start_service: StartService) -> None:
    """A request that is parsed in another process has the model's default length, too."""
    folder = write_folder(tmp_path / "model", byte_level_tokenizer())
    (folder / "generation_config.json").write_text('{"max_new_tokens": 5}')
    service = await start_service(model=str(folder), limits=LimitSettings(max_body_bytes=10**6))
    for padding in ("", "y" * 100_000):
        body = {"prompt": "hi", "ignore_eos": True, "metadata": {"x": padding}}
        status, answer = await service.post("/v1/completions", body)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 5)


def test_the_embedded_model_ships_calm_values(embedded_folder: Path) -> None:
    """The embedded model's folder recommends temperature 0.2 and top_p 0.9."""
    recommended = json.loads((embedded_folder / "generation_config.json").read_text())
    assert (recommended["temperature"], recommended["top_p"]) == (0.2, 0.9)
