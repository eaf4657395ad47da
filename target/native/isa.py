"""Which instruction sets of this processor the kernels can use."""

from __future__ import annotations

import functools
import platform
import sys

import llvmlite.binding as llvm

AVX2, AVX_VNNI, AVX512 = 0, 1, 2
ISAS = {"avx2": AVX2, "avx_vnni": AVX_VNNI, "avx512_vnni": AVX512}
"""By their names, each wider or denser than the one before. Results are bitwise the same on all of them."""

_NEEDED = {
    AVX2: ("avx2", "fma", "f16c"),
    AVX_VNNI: ("avxvnni",),
    AVX512: ("avx512f", "avx512bw", "avx512vl", "avx512vnni"),
}


@functools.cache
def supported_isas() -> tuple[int, ...]:
    """What this processor has, ascending; empty where the kernels cannot run."""
    features = llvm.get_host_cpu_features()

    def has(isa: int) -> bool:
        return all(features.get(name, False) for name in _NEEDED[isa])

    return tuple(isa for isa in ISAS.values() if has(AVX2) and has(isa))


def native_supported() -> tuple[bool, str]:
    """Whether the native step can run here, and a reason to print either way."""
    if platform.machine() not in {"x86_64", "AMD64"}:
        return False, f"the native kernels are for x86-64, not {platform.machine()}"
    if sys.platform != "linux":
        return False, f"the native kernels need Linux's futex, not {sys.platform}"
    if not supported_isas():
        return False, "the processor lacks AVX2, FMA or F16C"
    return True, f"the processor has {', '.join(name for name, isa in ISAS.items() if isa in supported_isas())}"
