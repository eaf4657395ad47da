"""What a measurement ran on: without it a number says nothing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine, at one moment."""

    processor: str
    cores: int
    """That this process may use."""
    memory_gib: float
    system: str
    python: str
    gpus: list[str]
    load_average: float
    """Processes that wanted a core, over the minute before. Well above 0 at the start, the numbers are noise."""
    measured_at: str
    """UTC."""


def describe_machine() -> Machine:
    """This machine, now."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(memory / 2**30, 1),
        system=platform.platform(),
        python=platform.python_version(),
        gpus=_gpus(),
        load_average=round(os.getloadavg()[0], 2),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _processor() -> str:
    """Its name, and of its instructions those that decide how fast a model runs."""
    info = Path("/proc/cpuinfo")
    fields = [line.partition(":") for line in info.read_text().splitlines()] if info.is_file() else []
    values = {name.strip(): value.strip() for name, _, value in fields}
    kinds = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8")
    found = [kind for kind in kinds if kind in values.get("flags", "").split()]
    return " ".join([values.get("model name", platform.machine()), *found])


def _gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []
