"""Which engine runs where, when one machine has several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one engine runs."""

    device: str
    cores: tuple[int, ...] | None = None
    """CPU cores it keeps to; None for all."""


def place_engines(device: str, num_engines: int, *, num_cuda: int | None = None) -> list[Place]:
    """A place for each engine: one CUDA device each, or a share of the cores.

    `num_cuda` is counted where it is None. Raises ValueError where the devices do not suffice.
    """
    if num_engines <= 1:
        return [Place(device)] * num_engines
    if device.startswith("cuda:"):
        raise ValueError(f"engines is {num_engines} and device {device!r}; say device cuda, and each gets one")
    num_cuda = count_cuda_devices() if num_cuda is None else num_cuda
    if device == "cuda" or (device == "auto" and num_cuda):
        if num_cuda < num_engines:
            raise ValueError(f"engines is {num_engines}, but there are {num_cuda} CUDA devices, and each needs one")
        return [Place(f"cuda:{index}") for index in range(num_engines)]
    cores = sorted(os.sched_getaffinity(0))
    return [Place(device, _share(cores, index, num_engines)) for index in range(num_engines)]


def count_cuda_devices() -> int:
    """How many CUDA devices a process started here may use, without loading what uses them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() not in {"", "-1"}])
    return len(list(NVIDIA_DEVICES.iterdir())) if NVIDIA_DEVICES.is_dir() else 0


def _share(cores: Sequence[int], index: int, num_engines: int) -> tuple[int, ...]:
    """Engines on each other's cores would more than halve their speed: each keeps to its own, while they last."""
    if num_engines > len(cores):
        return (cores[index % len(cores)],)
    return tuple(cores[len(cores) * index // num_engines : len(cores) * (index + 1) // num_engines])
