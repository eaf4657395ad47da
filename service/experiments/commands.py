"""`forerun experiment …` and `forerun report NAME --html OUT`: a running service's experiments from a terminal."""

from __future__ import annotations

import argparse
import asyncio
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from service.api_key import API_KEY_VARIABLE, ApiKeyError, authorization, key_of
from service.experiments.html_report import interval, render
from service.experiments.report import Report
from service.experiments.trace import Trace
from service.service_url import add_service_flags, service_url

Print = Callable[[str], None]
TIMEOUT = aiohttp.ClientTimeout(total=30.0)


class CommandError(Exception):
    """What the user is told before the command ends with 1."""


class Service:
    """The service at an address."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """The body of an answer. Raises `CommandError` with the service's own words."""
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(method, f"{self._url}{path}", data=body, headers=headers) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise CommandError(f"no answer from {self._url}: {error}") from error
        if response.status >= 400:
            hint = f" (--api-key, or {API_KEY_VARIABLE})" if response.status == 401 else ""
            raise CommandError((_said(answer) or f"{self._url}{path} answers {response.status}") + hint)
        return answer

    async def report(self, name: str) -> Report:
        answer = await self.call("GET", _path(name))
        return msgspec.json.decode(answer, type=_WithReport).report


class _WithReport(msgspec.Struct):
    report: Report


class _Listed(msgspec.Struct):
    status: str
    definition: dict[str, Any]
    ended_because: str = ""


class _List(msgspec.Struct):
    data: list[_Listed]


def experiment_command(arguments: Sequence[str], out: Print, environment: Mapping[str, str] = os.environ) -> int:
    """`forerun experiment create|list|watch|report|start|stop|promote`; the exit status."""
    return _run(experiment_parser().parse_args(arguments), environment, out, _experiment)


def experiment_parser() -> argparse.ArgumentParser:
    """The command line of `forerun experiment`; flags of the service stand before or after the subcommand."""
    parser = argparse.ArgumentParser(
        prog="forerun experiment", description="Create, watch and end A/B experiments on a running service."
    )
    add_service_flags(parser)
    commands = parser.add_subparsers(dest="command", required=True)
    create = commands.add_parser("create", help="create an experiment from a JSON or TOML file")
    create.add_argument("file", type=Path, help="definition of the experiment: docs/experiments.md shows one")
    create.add_argument("--draft", action="store_true", help="do not start it yet")
    commands.add_parser("list", help="all experiments, newest first")
    watch = commands.add_parser("watch", help="print the verdict whenever there is news, until it is conclusive")
    watch.add_argument("name", help="name of the experiment")
    watch.add_argument("--seconds", type=float, default=2.0, help="seconds between requests (default: 2)")
    for command, text in (("report", "print the report so far"), ("stop", "end it"), ("start", "start a draft")):
        commands.add_parser(command, help=text).add_argument("name", help="name of the experiment")
    promote = commands.add_parser("promote", help="make the arm that the data support the default")
    promote.add_argument("name", help="name of the experiment")
    promote.add_argument("--arm", help="promote this arm, whatever the data say")
    for subcommand in commands.choices.values():
        add_service_flags(subcommand, is_repeated=True)
    return parser


def report_command(arguments: Sequence[str], out: Print, environment: Mapping[str, str] = os.environ) -> int:
    """`forerun report NAME --html OUT`; the exit status."""
    return _run(report_parser().parse_args(arguments), environment, out, _html)


def report_parser() -> argparse.ArgumentParser:
    """The command line of `forerun report`."""
    parser = argparse.ArgumentParser(
        prog="forerun report", description="Write an experiment's report as one HTML file."
    )
    add_service_flags(parser)
    parser.add_argument("name", help="name of the experiment")
    parser.add_argument("--html", type=Path, required=True, metavar="OUT", help="file to write")
    return parser


def _run(chosen: argparse.Namespace, environment: Mapping[str, str], out: Print, command: Callable[..., Any]) -> int:
    async def connected() -> None:
        headers = authorization(key_of(chosen, environment))
        async with aiohttp.ClientSession(timeout=TIMEOUT, headers=headers) as session:
            await command(Service(session, service_url(chosen.url, environment)), chosen, out)

    try:
        asyncio.run(connected())
    except (CommandError, ApiKeyError) as error:
        out(f"forerun: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


async def _experiment(service: Service, chosen: argparse.Namespace, out: Print) -> None:
    match chosen.command:
        case "create":
            path = f"/v1/experiments?draft={'true' if chosen.draft else 'false'}"
            answer = msgspec.json.decode(await service.call("POST", path, _definition(chosen.file)))
            out(f"{answer['definition']['name']} is {answer['status']}")
            for warning in answer["warnings"]:
                out(f"warning: {warning}")
        case "list":
            answer = msgspec.json.decode(await service.call("GET", "/v1/experiments"), type=_List)
            for one in answer.data:
                out(f"{one.definition['name']:<32} {one.status:<10} {one.ended_because}".rstrip())
        case "watch":
            await _watch(service, chosen.name, chosen.seconds, out)
        case "report":
            out(describe(await service.report(chosen.name)))
        case "promote":
            body = msgspec.json.encode({} if chosen.arm is None else {"arm": chosen.arm})
            await service.call("POST", f"{_path(chosen.name)}/promote", body)
            out(f"{chosen.name} is promoted")
        case _:
            await service.call("POST", f"{_path(chosen.name)}/{chosen.command}")
            out(describe(await service.report(chosen.name)))


async def _watch(service: Service, name: str, seconds: float, out: Print) -> None:
    shown = -1
    while True:
        report = await service.report(name)
        if report.num_samples != shown:
            out(report.verdict)
            shown = report.num_samples
        if report.is_conclusive or report.status not in {"running", "promoted"}:
            return
        await asyncio.sleep(seconds)


async def _html(service: Service, chosen: argparse.Namespace, out: Print) -> None:
    report = await service.report(chosen.name)
    trace = msgspec.json.decode(await service.call("GET", f"{_path(chosen.name)}/trace"), type=Trace)
    page = render(report, trace)
    try:
        await asyncio.to_thread(chosen.html.write_text, page, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--html {chosen.html}: {error.strerror}") from error
    out(f"{chosen.html}: {report.verdict}")


def describe(report: Report) -> str:
    """A report for a terminal."""
    lines = [f"{report.name} ({report.status}, {report.allocation}): {report.verdict}"]
    for one in report.comparisons:
        both = f"{interval(one.adjusted)}, unadjusted {interval(one.unadjusted)}"
        lines += [f"  {one.arm} against {one.against}: {both}"]
    for arm in report.arms:
        counts = f"{arm.analysed:,} counted, {arm.failed:,} failed, {arm.aborted:,} aborted"
        level = "–" if arm.level is None else f"{arm.level:.4g}"
        lines.append(f"  {arm.name}: share {100.0 * arm.weight:.0f} %, {counts}, {report.metric} {level}")
    lines += [f"  guardrail of {rail.arm}: {rail.rule}: {rail.state}" for rail in report.guardrails]
    lines += [f"  warning: {warning}" for warning in report.warnings]
    return "\n".join(lines)


def _definition(path: Path) -> bytes:
    """A definition's file as JSON."""
    try:
        data = path.read_bytes()
        if path.suffix == ".toml":
            return msgspec.json.encode(tomllib.loads(data.decode()))
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CommandError(f"{path}: {error}") from error
    return data


def _path(name: str) -> str:
    return f"/v1/experiments/{quote(name, safe='')}"


def _said(answer: bytes) -> str:
    """The message of an error body, or nothing."""
    try:
        return str(msgspec.json.decode(answer)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""
