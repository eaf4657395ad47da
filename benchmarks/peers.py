"""Other systems to measure beside forerun, by the names that `--peers` takes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from benchmarks.llama_server import running_llama_server
from benchmarks.system import System
from benchmarks.worker_system import running_worker
from speculation.settings import EngineSettings

LOOKUP_TOKENS = 8
"""Draft tokens of the peers' prompt lookup, where a peer lets one choose."""

LLAMA_FLAGS: dict[str, tuple[str, ...]] = {
    "llama.cpp": (),
    # Its own defaults wait for a match of 12 tokens; these are the numbers that lookup has elsewhere.
    "llama.cpp-lookup": (
        *("--spec-type", "ngram-simple", "--spec-draft-n-max", str(LOOKUP_TOKENS)),
        *("--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", str(LOOKUP_TOKENS)),
    ),
    **{
        f"llama.cpp-{mode}": ("--spec-type", mode)
        for mode in ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
    },
}
WORKER_PEERS = (
    *("transformers", "transformers-assisted", "openvino", "openvino-lookup"),
    "forerun-engine",
)
PEERS = (*WORKER_PEERS, *LLAMA_FLAGS)
ONE_AT_A_TIME = ("transformers-assisted", "openvino-lookup")
"""Peers that cannot answer several at once."""


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What peers are started with."""

    engine: EngineSettings
    """forerun's own, for its engine without the service."""
    model_folder: Path
    """The target as a Hugging Face folder."""
    gguf: Path
    """The same as a GGUF file."""
    python: Path
    """The interpreter whose environment has the peers' packages."""
    llama_server: Path | None
    assistant: Path | None
    num_threads: int
    temperature: float
    batch: int


def check_peers(names: list[str], batch: int) -> None:
    """Raises ValueError for a name that is no peer, or a peer that cannot answer `batch` at once."""
    for name in names:
        if name not in PEERS:
            raise ValueError(f"peer {name!r} is not known; known are {', '.join(PEERS)}")
        if batch > 1 and name in ONE_AT_A_TIME:
            raise ValueError(f"peer {name} answers one request at a time; leave it out of --batch {batch}")


@asynccontextmanager
async def running_peer(name: str, settings: PeerSettings, session: aiohttp.ClientSession) -> AsyncIterator[System]:
    """Start a peer. Raises RuntimeError or ValueError saying what it lacks."""
    if name in LLAMA_FLAGS:
        async with running_llama_server(
            name,
            _method(name),
            server=settings.llama_server or find_llama_server(),
            gguf=settings.gguf,
            flags=LLAMA_FLAGS[name],
            num_threads=settings.num_threads,
            num_slots=settings.batch,
            temperature=settings.temperature,
            session=session,
        ) as server:
            yield server
        return
    python, module, arguments = _worker(name, settings)
    arguments += ["--temperature", str(settings.temperature)]
    async with running_worker(name, _method(name), python, module, arguments) as worker:
        yield worker


def _method(name: str) -> str:
    if name == "llama.cpp-lookup":
        return "ngram-simple n=3"
    if name in LLAMA_FLAGS:
        return name.removeprefix("llama.cpp").removeprefix("-") or "none"
    return {"transformers-assisted": "assisted", "openvino-lookup": "prompt lookup"}.get(name, "none")


def _worker(name: str, settings: PeerSettings) -> tuple[Path, str, list[str]]:
    """Interpreter, module and arguments. What forerun itself depends on runs in its own interpreter."""
    threads = ["--threads", str(settings.num_threads)]
    lookup = ["--lookup-tokens", str(LOOKUP_TOKENS)]
    match name:
        case "transformers":
            return Path(sys.executable), "transformers_worker", ["--model", str(settings.model_folder), *threads]
        case "transformers-assisted":
            helper = lookup if settings.assistant is None else ["--assistant", str(settings.assistant)]
            arguments = ["--model", str(settings.model_folder), *threads, *helper]
            return Path(sys.executable), "transformers_worker", arguments
        case "openvino":
            return settings.python, "openvino_worker", ["--model", str(settings.gguf), *threads]
        case "openvino-lookup":
            return settings.python, "openvino_worker", ["--model", str(settings.gguf), *threads, *lookup]
        case _:
            engine = msgspec.json.encode(settings.engine).decode()
            return Path(sys.executable), "engine_worker", ["--settings", engine]


def find_llama_server() -> Path:
    """The one on PATH. Raises ValueError if there is none."""
    found = shutil.which("llama-server")
    if found is None:
        raise ValueError("there is no llama-server on PATH; give --llama-server PATH")
    return Path(found)
