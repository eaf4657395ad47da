"""The Dockerfile, compose.yaml and deploy/: parsed, and every path in them found, without Docker."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.hosts import AllowedHosts
from service.settings import load_settings, options
from tests.e2e.compose import COMPOSE, DOCKERFILE, OURS, ROOT, SECRET, SERVICES, environment_of, forerun_command
from tests.e2e.compose import image_instructions as instructions


def test_what_the_image_copies_is_there() -> None:
    """Every source of a COPY exists and is let through by .dockerignore, and nothing else is."""
    sources = [word for words in instructions("COPY") if words[0] != "--from=build" for word in words[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    ignore = (ROOT / ".dockerignore").read_text().split()
    assert {line.removeprefix("!") for line in ignore if line.startswith("!")} == set(sources)
    rooms = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {room for room in rooms if "*" not in room} <= set(sources)


def test_links_in_what_the_image_copies_lead_to_what_it_copies() -> None:
    """A file of a package that is a link to another folder has its target in the image too."""
    copied = [ROOT / word for words in instructions("COPY") if words[0] != "--from=build" for word in words[:-1]]
    links = [path for folder in copied if folder.is_dir() for path in folder.rglob("*") if path.is_symlink()]
    assert links
    for link in links:
        target = link.resolve(strict=True)
        assert any(target == source or source in target.parents for source in copied), link


def test_the_image_runs_without_privileges() -> None:
    """It is built in two stages, the last of which has a user of its own and starts the project's command."""
    last = DOCKERFILE.split("\nFROM ")[-1]
    assert len(instructions("FROM")) == 2
    assert instructions("USER") == [["10001"]], "a number, or Kubernetes cannot tell that it is not root"
    assert "pip install" not in last
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert instructions("ENTRYPOINT") == [[json.dumps([name])] for name in scripts]
    assert {words[0].partition("=")[0] for words in instructions("ARG")} == {"PYTHON", "TORCH", "MODEL", "EXTRAS"}


def test_what_the_image_installs_is_pinned() -> None:
    """Each `pip install` names a file of exact versions or only the project; so do the extras."""
    joined = DOCKERFILE.replace("\\\n", " ")
    for arguments in re.findall(r"pip install ([^&;\n]+)", joined):
        assert re.search(r"(-r|--constraint) requirements/|--no-deps \. *$", arguments), arguments
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = dict(
        line.split("==")
        for line in (ROOT / "requirements/extras.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    for extra in ("ray", "flashinfer"):
        assert all(re.split(r"[<>=\[]", requirement)[0] in pinned for requirement in extras[extra])


def test_the_image_checks_its_health(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its check asks /health/ready on the port that the environment sets: 200 is healthy, 503 and silence are not."""
    ((*_, words),) = [
        line.partition("CMD ") for line in DOCKERFILE.replace("\\\n", " ").splitlines() if "HEALTHCHECK" in line
    ]
    _, *arguments = json.loads(words)
    status, asked = [200], []

    class Probe(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status[0])
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the standard library's name
            """Nothing."""

    def check() -> int:
        return subprocess.run([sys.executable, *arguments], check=False, stderr=subprocess.DEVNULL).returncode

    with ThreadingHTTPServer(("127.0.0.1", 0), Probe) as server:
        monkeypatch.setenv("FORERUN_PORT", str(server.server_port))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert check() == 0
            status[0] = 503
            assert check() != 0
        finally:
            server.shutdown()
            thread.join()
    assert check() != 0
    assert set(asked) == {"/health/ready"}


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


def test_prometheus_reaches_services_by_their_names() -> None:
    """Each target that is scraped is a service whose settings allow the name it is scraped by."""
    (job,) = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    targets = [target for config in job["static_configs"] for target in config["targets"]]
    assert len(targets) >= 4
    for target in targets:
        name = target.partition(":")[0]
        settings = load_settings([], environment_of(SERVICES[name]))
        assert AllowedHosts(settings.server.allowed_hosts).allows(target)
        assert not AllowedHosts(settings.server.allowed_hosts).allows("evil.example:8000")


def test_ray_services_start_what_there_is() -> None:
    """The head starts a front that asks Ray for engines; its workers join it; both have an image with the extra.

    Neither starts a dashboard or tells anybody that it is used.
    """
    front, worker = SERVICES["front-ray"], SERVICES["ray-worker"]
    settings = load_settings(forerun_command(front)[1:], environment_of(front))
    assert (settings.pool.ray, settings.pool.engines, settings.pool.secret) == ("auto", 2, SECRET)
    assert "--address=front-ray:6379" in worker["command"]
    assert "--port=6379" in front["command"][0]
    assert "--include-dashboard=false" in front["command"][0]
    assert "--disable-usage-stats" in front["command"][0]
    assert "--disable-usage-stats" in worker["command"]
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


def test_recorded_rules_are_those_that_are_used() -> None:
    """Panels and alerts name recorded rules that exist, and each recorded rule is used somewhere."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    expressions = [rule["expr"] for rule in rules() if "alert" in rule]
    expressions += [target["expr"] for panel in panels() for target in panel["targets"]]
    expressions.append((ROOT / "docs/operations.md").read_text())
    used = {name for expression in expressions for name in re.findall(r"\bforerun:[\w:]+", expression)}
    assert used == recorded


def test_every_expression_of_the_dashboard_is_of_the_chosen_fronts() -> None:
    """Each metric and each recorded rule in a panel is restricted to the variable `$instance`."""
    for panel in panels():
        for target in panel["targets"]:
            for name, selector in re.findall(r"\b(forerun[_:][\w:]+)(\{[^}]*\})?", target["expr"]):
                assert 'instance=~"$instance"' in selector, (panel["title"], name)


def test_acceptance_is_drawn_for_eight_positions() -> None:
    """A draft may have 64 positions: both sides of the ratio keep the first eight and no other."""
    (expression,) = (
        target["expr"] for panel in panels() for target in panel["targets"] if "at_position" in target["expr"]
    )
    patterns = re.findall(r'position=~"([^"]*)"', expression)
    assert len(patterns) == len(metric_names(expression)) == 2
    for pattern in patterns:
        assert [place for place in range(100) if re.fullmatch(pattern, str(place))] == list(range(1, 9))


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
    other = {"--profile", "--json", "--scale", "--help", "--disable-usage-stats", "--verify"}
    assert set(re.findall(r"`?(--[a-z][a-z0-9-]+)", page)) - other <= {option.flag for option in known}
    assert set(re.findall(r"FORERUN_[A-Z0-9_]+", page)) <= {option.variable for option in known}
    assert set(re.findall(r"`(Forerun\w+)`", page)) == {rule["alert"] for rule in rules() if "alert" in rule}
    for path in re.findall(r"`(deploy/[\w./-]+|compose\.yaml)`", page):
        assert (ROOT / path).exists(), path
