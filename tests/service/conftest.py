"""Model folders for the front: small tokenizers trained on the spot, and the embedded model's where it was fetched."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from service.app import ENGINE_LIFE, ENGINES, create_app
from service.context import FRONT
from service.front import Front
from service.pool.settings import PoolSettings, TenantSettings
from service.request_log import RecordingSettings
from service.server import create_runner, listen, url_of
from service.settings import AuditSettings, LimitSettings, ServerSettings, Settings
from service.supervisor import Supervisor
from speculation.messages import NgramConfig
from speculation.settings import EngineSettings
from target.embedded import embedded_model_dir
from target.errors import CheckpointError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. user assistant system",
    "Größe, naïve café, Ελληνικά, кириллица, 東京タワー, 👩‍👩‍👧 🎉",
] * 4


def byte_level_tokenizer() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen and SmolLM have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """As Llama 2 and Mistral have it: a space is ▁, unknown characters are bytes, and a text begins with a space."""
    bytes_ = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    letters = sorted({letter for text in CORPUS[:1] for letter in text.replace(" ", "▁")})
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **bytes_}
    vocabulary |= {letter: len(vocabulary) + i for i, letter in enumerate(letters)}
    merges = [("▁", "T"), ("h", "e"), ("▁T", "he"), ("▁", "q"), ("o", "x")]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, template: str | None = CHATML) -> Path:
    """A model folder, as far as the front reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "bos_token": "<|im_start|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"},
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small byte-level tokenizer and a ChatML template."""
    return write_folder(tmp_path_factory.mktemp("model"), byte_level_tokenizer())


@pytest.fixture(scope="session")
def embedded_folder() -> Path:
    """The embedded model's folder."""
    try:
        return embedded_model_dir()
    except CheckpointError:
        pytest.skip("the embedded model is not fetched; `forerun fetch` fetches it")


@dataclass
class Service:
    """A running service with the scripted engine, in this process, and a client for it."""

    url: str
    app: web.Application
    client: aiohttp.ClientSession

    @property
    def front(self) -> Front:
        return self.app[FRONT]

    @property
    def supervisors(self) -> list[Supervisor]:
        return list(self.app[ENGINES].supervisors.values())

    def app_supervisor(self, engine_id: str) -> Supervisor:
        return self.app[ENGINES].supervisors[engine_id]

    @property
    def supervisor(self) -> Supervisor:
        return self.supervisors[0]

    async def supervisor_life(self) -> None:
        """Wait until the engine is gone for good; raises what it ended with."""
        async with asyncio.timeout(10):
            await self.app[ENGINE_LIFE]

    async def post(self, path: str, body: object, **options: Any) -> tuple[int, Any]:
        """Status and JSON of a POST; a body of bytes is sent as it is."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(f"{self.url}{path}", data=data, **options) as response:
            return response.status, json.loads(await response.read())

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.client.get(f"{self.url}{path}", **options) as response:
            text = await response.text()
            return response.status, json.loads(text) if response.content_type == "application/json" else text

    async def events(self, path: str, body: dict[str, object]) -> list[Any]:
        """The events of a streamed answer; "[DONE]" as it is."""
        async with self.client.post(f"{self.url}{path}", json={**body, "stream": True}) as response:
            assert response.content_type == "text/event-stream", await response.text()
            return parse_events(await response.text())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is true, for half a minute at most."""
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_idle(self) -> None:
        """Wait until the engine says that no sequence is left and no block is in use."""

        def is_idle() -> bool:
            stats = self.front.metrics.engine.stats
            return self.front.client.num_live == 0 and stats is not None and stats.blocks_in_use == 0

        await self.until(is_idle)


def parse_events(text: str) -> list[Any]:
    """The data of each event; JSON where it is JSON. Comments, which a slow stream has, are no events."""
    data = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
    return [entry if entry == "[DONE]" else json.loads(entry) for entry in data]


def scripted_command(settings: Settings) -> list[str]:
    engine = msgspec.json.encode(settings.engine).decode()
    return [sys.executable, "-m", "tests.service.scripted_worker", "--settings", engine]


StartService = Callable[..., Awaitable[Service]]


@pytest.fixture
async def start_service(model_folder: Path) -> AsyncIterator[StartService]:
    """Starts services with the scripted engine; each is stopped at the end."""
    runners: list[web.AppRunner] = []
    async with aiohttp.ClientSession() as client:

        async def start(
            *,
            server: ServerSettings = ServerSettings(),  # noqa: B008 - frozen
            limits: LimitSettings = LimitSettings(),  # noqa: B008 - frozen
            audit_share: float = 0.0,
            command: list[str] | None = None,
            wait: bool = True,
            pool: PoolSettings = PoolSettings(),  # noqa: B008 - frozen
            tenants: TenantSettings = TenantSettings(),  # noqa: B008 - frozen
            recording: RecordingSettings = RecordingSettings(),  # noqa: B008 - frozen
            **engine: Any,
        ) -> Service:
            settings = Settings(
                server=server,
                limits=limits,
                pool=pool,
                tenants=tenants,
                recording=recording,
                audit=AuditSettings(audit_share=audit_share),
                engine=EngineSettings(**{"model": str(model_folder), **engine}),
                profiles={"fast": NgramConfig(num_speculative_tokens=2)},
            )
            app = create_app(settings, command or scripted_command(settings))
            runners.append(create_runner(app))
            await runners[-1].setup()
            await listen(runners[-1], "127.0.0.1", 0)
            service = Service(url_of(runners[-1]), app, client)
            if wait:
                await service.until(lambda: service.front.is_ready)
            return service

        yield start
        for runner in runners:
            await runner.cleanup()
            pool = runner.app[FRONT].client
            # Nobody is inside any more: a sequence that is still counted was leaked.
            assert pool.num_live == pool.num_waiting == 0
            assert not any(member.flights for member in pool.members.values())


@pytest.fixture
async def service(start_service: StartService) -> Service:
    """One service with the scripted engine."""
    return await start_service()
