"""Naming the arithmetic of a runner: two engines with different names may differ in the last bits of their numbers."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from target.native.runner import NativeRunner
from target.runner import Runner


def arithmetic_of(runner: Runner) -> str:
    """Runner kind, device class, instruction set and libraries, as far as they decide about bits.

    The native step gives the same bits on every instruction set and number of threads, so that neither is named; its
    rotary table and its logarithms come from torch and the C library. Libraries of products choose kernels by processor
    and by threads, or by device, and another version may choose others.
    """
    parts = [type(runner).__name__, f"torch {torch.__version__}"]
    if isinstance(runner, NativeRunner):
        return "/".join([*parts, runner.weight_kinds, "".join(platform.libc_ver())])
    library = runner.description.partition("products by ")[2].partition(" for ")[0]
    if runner.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(runner.device)
        name = torch.cuda.get_device_name(runner.device)
        return "/".join(
            [*parts, f"CUDA {torch.version.cuda}", name, f"{major}.{minor}", library, _attention_of(runner)]
        )
    capability = torch.backends.cpu.get_cpu_capability()
    return "/".join([*parts, _processor(), capability, f"{torch.get_num_threads()} threads", library])


def _attention_of(runner: Runner) -> str:
    """The class that computes attention, where the runner has a choice of them."""
    return type(getattr(runner, "_attention", None)).__name__


def _processor() -> str:
    """The processor's model, as Linux says it; elsewhere its architecture."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            lines = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        lines = []
    return lines[0] if lines else platform.machine()
