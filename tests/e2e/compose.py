"""compose.yaml: what it says, and its services as processes with their commands and environments, without Docker."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.ray_node import RayNode
from tests.redis_server import RedisServer, free_port

ROOT = Path(__file__).resolve().parent.parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"].startswith("forerun")}
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SECRET = "a secret of our own"
START_SECONDS = 200.0
PROGRAMS = {
    "forerun": "import sys; from service.__main__ import main; sys.exit(main())",
    "ray": "import sys; from ray.scripts.scripts import main; sys.exit(main())",
}
"""What the image has on its PATH, whether or not it is on PATH here."""


def image_instructions(name: str) -> list[list[str]]:
    """The words behind each instruction of that name in the Dockerfile."""
    joined = DOCKERFILE.replace("\\\n", " ")
    return [line.split()[1:] for line in joined.splitlines() if line.startswith(f"{name} ")]


def interpolated(text: str, variables: Mapping[str, str]) -> str:
    """As compose fills in `${NAME:-default}`, and lets `$$` through as a dollar."""
    filled = re.sub(r"(?<!\$)\$\{(\w+):-([^}]*)\}", lambda found: variables.get(found[1]) or found[2], text)
    return filled.replace("$$", "$")


def command_line(service: dict[str, Any]) -> list[str]:
    """What a container of one of our services runs."""
    return [interpolated(word, {}) for word in [*service.get("entrypoint", ["forerun"]), *service["command"]]]


def forerun_command(service: dict[str, Any]) -> list[str]:
    """What a service asks of `forerun`, or of the other program that it starts."""
    if service.get("entrypoint") != ["/bin/sh", "-c"]:
        return list(service["command"])
    (script,) = service["command"]
    _, _, command = script.replace("$${ENGINES:-2}", "2").partition("exec forerun ")
    return shlex.split(command)


def environment_of(service: dict[str, Any], variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """What compose sets, with `variables` of its own and a secret filled in, over what the image sets for forerun."""
    image = dict(word.split("=", 1) for words in image_instructions("ENV")[-1:] for word in words)
    kept = {name: value for name, value in image.items() if name.startswith("FORERUN_")}
    known = {"FORERUN_SECRET": SECRET, **(variables or {})}
    return {name: interpolated(str(value), known) for name, value in {**kept, **service.get("environment", {})}.items()}


class Deployment:
    """Runs services of compose.yaml as processes, beside a test's Redis and with its model."""

    def __init__(self, redis: RedisServer, model: Path, models: Path, folder: Path) -> None:
        """`models` is the volume of that name, `folder` where logs go."""
        self._redis = redis
        self._model = model
        self._models = models
        self._folder = folder
        self._num_started = 0
        self._programs = folder / "bin"
        self._programs.mkdir()
        for name, code in PROGRAMS.items():
            program = self._programs / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{code}" "$@"\n')
            program.chmod(0o755)

    @asynccontextmanager
    async def running(self, name: str, swaps: Mapping[str, str] | None = None) -> AsyncIterator[int]:
        """The port on which one container of a service serves, once its own health check says that it does.

        `swaps` are words of its command and what is in their place here.
        """
        service, port = OURS[name], free_port()
        process, log = await self.start(name, port, swaps)
        try:
            async with asyncio.timeout(START_SECONDS):
                while not await is_healthy(service, port):
                    assert process.returncode is None, log.read_text()[-3000:]
                    await asyncio.sleep(0.3)
            yield port
        finally:
            if process.returncode is None:
                process.terminate()
            async with asyncio.timeout(60):
                assert await process.wait() == 0, log.read_text()[-3000:]

    async def start(
        self, name: str, port: int, swaps: Mapping[str, str] | None = None
    ) -> tuple[asyncio.subprocess.Process, Path]:
        """The process of one container, which is to serve on `port`, and its log."""
        service = OURS[name]
        swaps = {"0.0.0.0:9000": f"0.0.0.0:{port}", **(swaps or {})}
        command = [swaps.get(word, word) for word in command_line(service)]
        self._num_started += 1
        log = self._folder / f"{name}-{self._num_started}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command, env=self.environment(name, port), stdout=output, stderr=output, cwd=ROOT
            )
        return process, log

    def start_ray(self, name: str, port: int, cluster: str, variables: Mapping[str, str]) -> RayNode:
        """One container of a service of the profile `ray`, whose cluster's head is at `cluster` (HOST:PORT) here."""
        port_flag = f"--port={cluster.rpartition(':')[2]}"
        words = command_line(OURS[name])
        command = [word.replace("front-ray:6379", cluster).replace("--port=6379", port_flag) for word in words]
        # "auto" is the cluster on this machine, and there may be others here.
        return RayNode(command, {**self.environment(name, port, variables), "RAY_ADDRESS": cluster})

    def environment(self, name: str, port: int, variables: Mapping[str, str] | None = None) -> dict[str, str]:
        """That of one container, with what only this machine knows."""
        service = OURS[name]
        outside = {key: value for key, value in os.environ.items() if not key.startswith("FORERUN_")}
        here = {
            "PATH": os.pathsep.join([str(self._programs), outside["PATH"]]),
            "FORERUN_STORE": self._redis.url,
            "FORERUN_STORE_TIMEOUT": "2",
            "FORERUN_MODEL": str(self._model),
            "FORERUN_NUM_BLOCKS": "200",
            "FORERUN_CACHE_DIR": str(self._models),
        }
        if forerun_command(service)[0] == "serve":
            here |= {"FORERUN_PORT": str(port), "FORERUN_HOST": "127.0.0.1"}
        return {**outside, **environment_of(service, variables), **here}


async def is_healthy(service: dict[str, Any], port: int) -> bool:
    """What the service's own health check says."""
    _, interpreter, *arguments = service["healthcheck"]["test"]
    assert interpreter == "python"
    code = [re.sub(r"\b(8000|9000)\b", str(port), word) for word in arguments]
    process = await asyncio.create_subprocess_exec(sys.executable, *code, stderr=asyncio.subprocess.DEVNULL)
    return await process.wait() == 0
