"""Threads inside one step: sharing out tasks, waiting for one another, and sleeping between steps.

Waiting spins for a bounded time and then sleeps in the kernel (a futex), so that a thread whose partner was descheduled
does not take a processor from whoever needs it. All words are int32 in cache lines of their own.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from target.native.compiling import intrinsic, native
from target.native.emit import I32, I64, call
from target.native.vectors import Lowered

LINE = 64
STARTED, IDLE, ARRIVED, PHASE, WAITING, STOPPED = (LINE * i for i in range(6))
"""Byte offsets of the control words: steps started, workers asleep before one, threads that reached the barrier,
barriers passed, threads asleep in one, whether the workers shall end."""
NEXT_TASK = 8 * LINE
"""Byte offset of the first thread's count of tasks taken; the others' follow, a line each."""

_FUTEX, _WAIT_PRIVATE, _WAKE_PRIVATE = 202, 128, 129


def control_bytes(num_threads: int) -> int:
    """Size of the control words."""
    return NEXT_TASK + LINE * num_threads


@intrinsic
def atomic_load(typingctx: Any, address: Any) -> Lowered:
    """The word at `address`, and everything written before it was."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], ir.PointerType(I32)), "seq_cst", 4)

    return types.int32(types.int64), emit


@intrinsic
def atomic_add(typingctx: Any, address: Any, value: Any) -> Lowered:
    """Add to the word at `address`; returns what it was."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], ir.PointerType(I32)), args[1], "seq_cst")

    return types.int32(types.int64, types.int32), emit


@intrinsic
def atomic_store(typingctx: Any, address: Any, value: Any) -> Lowered:
    """Set the word at `address`, after everything written before."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store_atomic(args[1], b.inttoptr(args[0], ir.PointerType(I32)), "release", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int32), emit


@intrinsic
def pause(typingctx: Any) -> Lowered:
    """Tell the processor that this is a waiting loop."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        call(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def clock_ticks(typingctx: Any) -> Lowered:
    """The time stamp counter."""
    return types.int64(), lambda context, b, signature, args: call(b, "llvm.readcyclecounter", I64, [])


def _futex(b: Any, address: Any, operation: int, value: Any) -> None:
    zero = ir.Constant(I64, 0)
    number, code = ir.Constant(I64, _FUTEX), ir.Constant(I64, operation)
    call(b, "syscall", I64, [number, address, code, b.sext(value, I64), zero, zero, zero])


@intrinsic
def futex_wait(typingctx: Any, address: Any, value: Any) -> Lowered:
    """Sleep while the word at `address` is `value`, or less long."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _futex(b, args[0], _WAIT_PRIVATE, args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int32), emit


@intrinsic
def futex_wake(typingctx: Any, address: Any) -> Lowered:
    """Wake everybody who sleeps on the word at `address`."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _futex(b, args[0], _WAKE_PRIVATE, ir.Constant(I32, 2**31 - 1))
        return context.get_dummy_value()

    return types.void(types.int64), emit


@native
def wait_while(word: int, value: int, sleepers: int, spin_ticks: int) -> None:
    """Return once the word at `word` is no longer `value`; `sleepers` counts who must be woken for it."""
    start = clock_ticks()
    while clock_ticks() - start < spin_ticks:
        if atomic_load(word) != value:
            return
        pause()
    atomic_add(sleepers, 1)
    while atomic_load(word) == value:
        futex_wait(word, value)
    atomic_add(sleepers, -1)


@native
def change(word: int, sleepers: int) -> None:
    """Add one to a word that others wait for, and wake those asleep."""
    atomic_add(word, 1)
    if atomic_load(sleepers) > 0:
        futex_wake(word)


@native
def meet(control: int, num_threads: int, spin_ticks: int) -> None:
    """A barrier: returns when all threads have called it. The next phase's tasks are then free to take."""
    phase = atomic_load(control + PHASE)
    if atomic_add(control + ARRIVED, 1) < num_threads - 1:
        wait_while(control + PHASE, phase, control + WAITING, spin_ticks)
        return
    atomic_store(control + ARRIVED, 0)
    for thread in range(num_threads):
        atomic_store(control + NEXT_TASK + LINE * thread, 0)
    change(control + PHASE, control + WAITING)


@native
def take_task(control: int, thread: int, num_threads: int, num_tasks: int) -> int:
    """A task nobody else has: of this thread's own contiguous share, then of the others'; -1 when none is left."""
    for distance in range(num_threads):
        owner = (thread + distance) % num_threads
        first, last = num_tasks * owner // num_threads, num_tasks * (owner + 1) // num_threads
        task = first + atomic_add(control + NEXT_TASK + LINE * owner, 1)
        if task < last:
            return task
    return -1
