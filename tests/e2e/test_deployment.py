"""The Dockerfile, compose.yaml and deploy/: parsed, and every command and path in them run or found, without Docker."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import socket
import sys
import tomllib
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.random_model import write_random_model
from service.settings import load_settings, options
from tests.redis_server import RedisServer

ROOT = Path(__file__).resolve().parent.parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"].startswith("forerun")}
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SECRET = "a secret of our own"
START_SECONDS = 200.0
FORERUN = (sys.executable, "-c", "import sys; from service.__main__ import main; sys.exit(main())")
"""The image's entry point, whether or not it is on PATH here."""


def instructions(name: str) -> list[list[str]]:
    """The words behind each instruction of that name."""
    joined = DOCKERFILE.replace("\\\n", " ")
    return [line.split()[1:] for line in joined.splitlines() if line.startswith(f"{name} ")]


def forerun_command(service: dict[str, Any]) -> list[str]:
    """What a service asks of `forerun`, or of the other program that it starts."""
    if service.get("entrypoint") != ["/bin/sh", "-c"]:
        return list(service["command"])
    (script,) = service["command"]
    _, _, command = script.replace("$${ENGINES:-2}", "2").partition("exec forerun ")
    return shlex.split(command)


def environment_of(service: dict[str, Any]) -> dict[str, str]:
    """What compose sets, with its own variables filled in, over what the image sets."""
    image = dict(word.split("=", 1) for words in instructions("ENV")[-1:] for word in words)
    found = {**image, **service.get("environment", {})}
    return {
        name: re.sub(r"\$\{FORERUN_SECRET:-\}", SECRET, str(value))
        for name, value in found.items()
        if name.startswith("FORERUN_")
    }


def test_what_the_image_copies_is_there() -> None:
    """Every source of a COPY exists and is let through by .dockerignore, and nothing else is."""
    sources = [word for words in instructions("COPY") if words[0] != "--from=build" for word in words[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    ignore = (ROOT / ".dockerignore").read_text().split()
    assert {line.removeprefix("!") for line in ignore if line.startswith("!")} == set(sources)
    rooms = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {room for room in rooms if "*" not in room} <= set(sources)


def test_the_image_runs_without_privileges() -> None:
    """It is built in two stages, the last of which has a user of its own and starts the project's command."""
    last = DOCKERFILE.split("\nFROM ")[-1]
    assert len(instructions("FROM")) == 2
    assert "USER forerun" in last
    assert "pip install" not in last
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert instructions("ENTRYPOINT") == [[json.dumps([name])] for name in scripts]
    assert {words[0].partition("=")[0] for words in instructions("ARG")} == {"PYTHON", "TORCH", "MODEL", "EXTRAS"}


def test_profiles_are_those_that_the_file_explains() -> None:
    """Each profile is mentioned at the head of compose.yaml, and what has none is the service and its Redis."""
    profiles = {profile for service in SERVICES.values() for profile in service.get("profiles", [])}
    head = (ROOT / "compose.yaml").read_text().partition("\nname:")[0]
    assert profiles == set(re.findall(r"--profile (\w+)", head))
    assert {"gpu", "pool", "observability"} <= profiles
    assert {name for name, service in SERVICES.items() if "profiles" not in service} == {"forerun", "redis"}


@pytest.mark.parametrize("name", SERVICES)
def test_services_restart_have_limits_and_are_private(name: str) -> None:
    """Each restarts by itself, has a memory limit, publishes ports on this machine alone and mounts what is there."""
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert "memory" in service["deploy"]["resources"]["limits"]
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:")
    for volume in service.get("volumes", []):
        source = volume.split(":")[0]
        assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
    for needed in service.get("depends_on", []):
        assert needed in SERVICES


def test_published_ports_do_not_collide() -> None:
    """Every profile can run beside every other."""
    ports = [port.split(":")[1] for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == len(set(ports))


@pytest.mark.parametrize("name", OURS)
def test_our_settings_are_settings(name: str) -> None:
    """Command and environment of each of our services are understood, and it is checked for health."""
    service = OURS[name]
    command, *flags = forerun_command(service)
    if command in {"serve", "engine"}:
        settings = load_settings(flags, environment_of(service), program=f"forerun {command}")
        assert settings.pool.store == "redis://redis:6379/0"
        assert service["healthcheck"]["test"][0] == "CMD"
    assert service["depends_on"]["redis"]["condition"] == "service_healthy"


def test_ray_services_start_what_there_is() -> None:
    """The head starts a front that asks Ray for engines; its workers join it; both have an image with the extra."""
    front, worker = SERVICES["front-ray"], SERVICES["ray-worker"]
    settings = load_settings(forerun_command(front)[1:], environment_of(front))
    assert (settings.pool.ray, settings.pool.engines, settings.pool.secret) == ("auto", 2, SECRET)
    assert "--address=front-ray:6379" in worker["command"]
    assert "--port=6379" in front["command"][0]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for service in (front, worker):
        assert service["build"]["args"]["EXTRAS"] in extras
        assert service["image"] == "forerun:ray"


def test_the_gpu_profile_reserves_a_device() -> None:
    """It asks for an NVIDIA device and builds the image with the CUDA build of torch."""
    service = SERVICES["forerun-gpu"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert service["build"]["args"]["TORCH"].startswith("cu")
    assert load_settings(service["command"][1:], {}).engine.device == "cuda"


class Deployment:
    """Runs services of compose.yaml as processes, with their commands and environments, beside a test's Redis."""

    def __init__(self, redis: RedisServer, model: Path, folder: Path) -> None:
        self._redis = redis
        self._model = model
        self._folder = folder
        self._num_started = 0

    @asynccontextmanager
    async def running(self, name: str) -> AsyncIterator[int]:
        """The port on which one container of a service serves, once its own health check says that it does."""
        service = OURS[name]
        port = free_port()
        swap = {"9000": str(port)} if service["command"][0] == "engine" else {}
        command = [re.sub("9000", swap.get("9000", "9000"), word) for word in service["command"]]
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("FORERUN_")},
            **environment_of(service),
            "FORERUN_STORE": self._redis.url,
            "FORERUN_STORE_TIMEOUT": "2",
            "FORERUN_MODEL": str(self._model),
            "FORERUN_NUM_BLOCKS": "200",
            "FORERUN_CACHE_DIR": str(self._folder / "cache"),
        }
        if service["command"][0] == "serve":
            environment |= {"FORERUN_PORT": str(port), "FORERUN_HOST": "127.0.0.1"}
        self._num_started += 1
        log = self._folder / f"{name}-{self._num_started}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *FORERUN, *command, env=environment, stdout=output, stderr=output, cwd=ROOT
            )
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


async def is_healthy(service: dict[str, Any], port: int) -> bool:
    """What the service's own health check says."""
    _, interpreter, *arguments = service["healthcheck"]["test"]
    assert interpreter == "python"
    code = [re.sub(r"\b(8000|9000)\b", str(port), word) for word in arguments]
    process = await asyncio.create_subprocess_exec(sys.executable, *code, stderr=asyncio.subprocess.DEVNULL)
    return await process.wait() == 0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def ask(port: int) -> dict[str, Any]:
    """A completion that repeats itself, so that something is guessed."""
    body = json.dumps({"prompt": [5, 6, 7, 8] * 10, "max_tokens": 24, "temperature": 0, "speculation": "ngram"})
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310 - our own address
        return dict(json.load(response))


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
        return str(response.read().decode())


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that starts quickly, in the place of the embedded one."""
    return write_random_model(tmp_path_factory.mktemp("model"), hidden_size=64, num_layers=2)


@pytest.fixture
def deployment(start_redis: Callable[..., RedisServer], random_model: Path, tmp_path: Path) -> Deployment:
    """Redis as compose starts it, but for where it keeps its file."""
    _, *flags = SERVICES["redis"]["command"]
    return Deployment(start_redis(*flags), random_model, tmp_path)


async def test_the_default_service_serves(deployment: Deployment) -> None:
    """`docker compose up` without a profile: healthy by its own check, it answers; every metric in deploy/ is there."""
    async with deployment.running("forerun") as port:
        assert (await asyncio.to_thread(ask, port))["usage"]["completion_tokens"] == 24
        async with asyncio.timeout(30):
            while unknown := metrics_in_use() - known_metrics(await asyncio.to_thread(get, port, "/metrics")):
                await asyncio.sleep(0.2)
                await asyncio.to_thread(ask, port)
        assert not unknown


async def test_the_pool_serves_with_the_engines_it_finds(deployment: Deployment) -> None:
    """The profile `pool` with two engines: both are found, used, and healthy by their own check."""
    async with deployment.running("engine"), deployment.running("engine"), deployment.running("front") as port:
        async with asyncio.timeout(60):
            while True:
                engines = json.loads(await asyncio.to_thread(get, port, "/v1/engines"))["data"]
                if sum(engine["state"] == "serving" for engine in engines) == 2:
                    break
                await asyncio.sleep(0.2)
        answers = [await asyncio.to_thread(ask, port) for _ in range(2)]
        assert answers[0]["choices"] == answers[1]["choices"]


def metric_names(expression: str) -> set[str]:
    return set(re.findall(r"\bforerun_\w+", expression))


def rules() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())["groups"]:
        yield from group["rules"]


def panels() -> list[dict[str, Any]]:
    return list(json.loads((ROOT / "deploy/grafana/dashboards/forerun.json").read_text())["panels"])


def metrics_in_use() -> set[str]:
    """Every metric that a rule or a panel names."""
    expressions = [rule["expr"] for rule in rules()]
    expressions += [target["expr"] for panel in panels() for target in panel["targets"]]
    return {name for expression in expressions for name in metric_names(expression)}


def known_metrics(page: str) -> set[str]:
    """Every name on a page for Prometheus."""
    return {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}


def test_recorded_rules_are_those_that_are_used() -> None:
    """Panels and alerts name recorded rules that exist, and each recorded rule is used somewhere."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    expressions = [rule["expr"] for rule in rules() if "alert" in rule]
    expressions += [target["expr"] for panel in panels() for target in panel["targets"]]
    expressions.append((ROOT / "docs/operations.md").read_text())
    used = {name for expression in expressions for name in re.findall(r"\bforerun:[\w:]+", expression)}
    assert used == recorded


def test_prometheus_reads_what_compose_mounts_and_asks_our_fronts() -> None:
    """Its files lie where its command and they themselves say, and each target is a front of ours."""
    service = SERVICES["prometheus"]
    (mount,) = (volume for volume in service["volumes"] if volume.startswith("."))
    source, target, _ = mount.split(":")

    def here(path: str) -> Path:
        return ROOT / str(source) / Path(path).relative_to(target)

    (config_flag,) = (flag for flag in service["command"] if flag.startswith("--config.file="))
    config = yaml.safe_load(here(config_flag.partition("=")[2]).read_text())
    assert all(here(path).exists() for path in config["rule_files"])
    (job,) = config["scrape_configs"]
    (targets,) = (group["targets"] for group in job["static_configs"])
    fronts = {name for name, ours in OURS.items() if forerun_command(ours)[0] == "serve"}
    assert set(targets) == {f"{name}:8000" for name in fronts}
    assert job["metrics_path"] == "/metrics"


def test_grafana_finds_its_dashboard_and_its_source() -> None:
    """The dashboard lies where the provider looks, its panels ask the provisioned source, and none overlaps another."""
    mounts = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"] if volume.startswith("."))
    inside = {target: ROOT / source for source, target in mounts.items()}
    provisioning = inside["/etc/grafana/provisioning"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/forerun.yml").read_text())["providers"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (inside[provider["options"]["path"]] / Path(home).name).exists()
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        assert panel["datasource"]["uid"] == source["uid"]
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not own & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= own


def test_the_operations_page_names_what_there_is() -> None:
    """Every flag, variable, alert and file that docs/operations.md names exists, and every alert is in its table."""
    page = (ROOT / "docs/operations.md").read_text()
    known = list(options())
    other = {"--profile", "--json", "--scale", "--help", "--disable-usage-stats"}
    assert set(re.findall(r"`?(--[a-z][a-z0-9-]+)", page)) - other <= {option.flag for option in known}
    assert set(re.findall(r"FORERUN_[A-Z0-9_]+", page)) <= {option.variable for option in known}
    assert set(re.findall(r"`(Forerun\w+)`", page)) == {rule["alert"] for rule in rules() if "alert" in rule}
    for path in re.findall(r"`(deploy/[\w./-]+|compose\.yaml)`", page):
        assert (ROOT / path).exists(), path
