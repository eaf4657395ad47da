"""Compiles every kernel for compute capability 9.0, which needs no device; prints the names of what came out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from target.triton import attention_kernels, layer_kernels, sampling_kernels


def compile_kernel(kernel: Any, types: str, constants: Mapping[str, float], **options: int) -> None:
    given = iter(types.split())
    signature = {name: "constexpr" if name in constants else next(given) for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"]
    print(kernel.__name__)  # noqa: T201  the test that starts this counts the lines


HEADS = {"H": 32, "K": 8}
TILES = {"GROUP": 4, "TILE": 16, "SPLIT": 256, "BLOCK_SIZE": 16, "INTERPRETED": False}
for size, padded, keys in ((64, 64, 64), (96, 128, 64), (128, 128, 64), (256, 256, 32)):
    compile_kernel(
        attention_kernels.attend_kernel,
        "*bf16 *bf16 *i32 *bf16 *fp32 *fp32 *fp32 fp32 i32",
        HEADS | TILES | {"D": size, "D_PAD": padded, "KEYS": keys},
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=False,
    )
compile_kernel(
    attention_kernels.merge_kernel,
    "*i32 *fp32 *fp32 *fp32 *bf16",
    {"H": 32, "D": 128, "D_PAD": 128, "GROUP": 4, "GROUP_PAD": 4},
)
for norm in (True, False):
    compile_kernel(
        attention_kernels.rotate_and_write_kernel,
        "*bf16 *bf16 *i32 *bf16 *bf16 *bf16 *bf16 fp32 i32",
        HEADS | {"D": 128, "HALF_PAD": 64, "ROTATE": True, "NORM": norm},
    )
compile_kernel(layer_kernels.norm_kernel, "*bf16 *bf16 *bf16 *bf16 fp32", {"E": 576, "E_PAD": 1024, "ADD": True})
compile_kernel(layer_kernels.gated_kernel, "*bf16 *bf16", {"F": 14336, "BLOCK": 1024})
compile_kernel(
    layer_kernels.quantise_kernel,
    "*bf16 *fp8e4nv *fp32",
    {"K": 14336, "K_PAD": 16384, "LARGEST": 448.0, "SMALLEST": 1e-12},
    num_warps=16,
)
compile_kernel(sampling_kernels.maxima_kernel, "*fp32 i32 *fp32 *fp32 i32 i32", {"PART": 2048})
compile_kernel(
    sampling_kernels.choose_kernel,
    "*fp32 i32 *fp32 *fp32 *i64 *fp32 *fp64 *i64 i32 i32",
    {"PART": 2048, "PARTS_PAD": 64},
)
