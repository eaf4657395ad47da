"""Runs unmodified clients of the OpenAI API against a service with the embedded model: `make clients`.

Each client runs its example in docs/clients.md, as printed but for the address and the tokenizer's folder, and a
program that asserts more, with the interpreter of its own environment. Nothing here is part of `make test`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.server_process import ServerFailedError, serving
from target.embedded import embedded_model_dir
from tests.clients.checks import Check, has_benchmarked, has_evaluated, has_printed, has_profiled
from tests.clients.examples import Example, examples

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs/clients.md"
PROGRAMS = Path(__file__).resolve().parent / "programs"
ADDRESS = "http://127.0.0.1:8000"
"""Of the service in the page's examples."""
TOKENIZER = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""In the page's examples; a folder with the same files takes its place, so that nothing is downloaded."""
LIMIT_SECONDS = 600
NUM_TAIL_LINES = 25


@dataclass(frozen=True, slots=True)
class Client:
    """One client: its example's title, where it is installed, and what the example must leave behind."""

    title: str
    environment: str
    package: str
    check: Check
    program: str | None = None

    @property
    def name(self) -> str:
        return self.title.lower().split()[0]

    @property
    def requirements(self) -> Path:
        return ROOT / f"requirements/clients-{self.environment}.txt"

    @property
    def version(self) -> str:
        pinned = re.search(rf"^{re.escape(self.package)}==(.+)$", self.requirements.read_text(), re.MULTILINE)
        if pinned is None:
            raise ValueError(f"{self.requirements} does not pin {self.package}")
        return pinned[1]

    def example(self) -> Example:
        """Its only example. Raises ValueError if the page has none or several."""
        found = [example for example in examples(PAGE) if example.title == self.title]
        if len(found) != 1:
            raise ValueError(f"{PAGE} has {len(found)} examples under {self.title!r}, expected 1")
        return found[0]


CLIENTS = (
    Client("openai for Python", "sdks", "openai", has_printed, "openai_client.py"),
    Client("LangChain", "sdks", "langchain-openai", has_printed, "langchain_client.py"),
    Client("LiteLLM", "sdks", "litellm", has_printed, "litellm_client.py"),
    Client("LlamaIndex", "llamaindex", "llama-index-llms-openai-like", has_printed, "llamaindex_client.py"),
    Client("lm-eval", "evaluation", "lm_eval", has_evaluated),
    Client("AIPerf", "aiperf", "aiperf", has_profiled),
    Client("GuideLLM", "evaluation", "guidellm", has_benchmarked),
)


@dataclass(frozen=True, slots=True)
class Site:
    """Where clients run: the service's address, the model's folder, and the folder of environments."""

    url: str
    model: Path
    environments: Path

    def failures(self, client: Client) -> list[str]:
        """Run a client's example and program in an empty folder; returns the reason of each failure."""
        found = []
        with tempfile.TemporaryDirectory(prefix="forerun-client-") as name:
            folder = Path(name)
            work = folder / "work"
            work.mkdir()
            (work / "tests").symlink_to(ROOT / "tests")
            programs = (self.environments / client.environment / "bin").absolute()
            python = str(programs / "python")
            example = client.example()
            code = example.code.replace(ADDRESS, self.url).replace(TOKENIZER, str(self.model))
            command = [python, "-c", code] if example.language == "python" else ["/bin/sh", "-ec", code]
            environment = _environment(folder, programs)
            reason, output = _run(command, work, environment)
            if reason is None:
                try:
                    client.check(work, output)
                except (AssertionError, OSError, LookupError, ValueError) as error:
                    reason = f"{error!r}\n{_tail(output)}"
            if reason is not None:
                found.append(f"example: {reason}")
            if client.program is not None:
                reason, _ = _run([python, str(PROGRAMS / client.program), self.url], work, environment)
                if reason is not None:
                    found.append(f"{client.program}: {reason}")
        return found


def _environment(folder: Path, programs: Path) -> dict[str, str]:
    """Of a user without configuration: an empty home, caches in `folder`, nothing asked of other machines."""
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "SSL_CERT_FILE") if name in os.environ}
    return {
        **kept,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "NO_PROXY": "127.0.0.1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
    }


def _run(command: Sequence[str], folder: Path, environment: dict[str, str]) -> tuple[str | None, str]:
    """Why a command failed, or None, and what it printed."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not finished after {LIMIT_SECONDS} s", ""
    except OSError as error:
        return f"{error}: is it installed? (make clients)", ""
    if done.returncode:
        return f"exit status {done.returncode}\n{_tail(done.stdout)}", done.stdout
    return None, done.stdout


def _tail(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-NUM_TAIL_LINES:])


async def run_all(clients: Sequence[Client], environments: Path, url: str | None) -> int:
    """Run clients one after another and print a line for each; returns how many failed."""
    async with AsyncExitStack() as stack:
        if url is None:
            command = [sys.executable, "-m", "service", "--port"]
            server = await stack.enter_async_context(serving(lambda port: [*command, str(port)], "/health/ready"))
            url = server.url
        site = Site(url, embedded_model_dir(), environments)
        num_failed = 0
        for client in clients:
            begin = time.monotonic()
            reasons = await asyncio.to_thread(site.failures, client)
            seconds = time.monotonic() - begin
            verdict = "failed" if reasons else "ok"
            print(f"{client.title:<18} {client.version:<10} {verdict:<7} {seconds:6.1f} s", flush=True)
            for reason in reasons:
                print("    " + reason.replace("\n", "\n    "), flush=True)
            num_failed += bool(reasons)
    return num_failed


def main() -> None:
    by_name = {client.name: client for client in CLIENTS}
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"default: all of {', '.join(by_name)}")
    parser.add_argument(
        "--environments", type=Path, default=ROOT / ".venv-clients", help="folder of virtual environments"
    )
    parser.add_argument("--url", help="a running service with the embedded model (default: start one)")
    asked = parser.parse_args()
    unknown = [name for name in asked.clients if name not in by_name]
    if unknown:
        parser.error(f"unknown client {unknown[0]!r}: known are {', '.join(by_name)}")
    clients = [by_name[name] for name in asked.clients] or list(CLIENTS)
    try:
        num_failed = asyncio.run(run_all(clients, asked.environments, asked.url))
    except ServerFailedError as error:
        sys.exit(f"the service did not start: {error}")
    if num_failed:
        sys.exit(f"{num_failed} of {len(clients)} clients failed")


if __name__ == "__main__":
    main()
