"""The process that speaks to Ray for a front: `python -m service.pool.ray_driver`.

It is one of its own because Ray may keep whoever asks an absent cluster waiting for minutes, and ends whoever has lost
the head of its cluster. An `Order` comes in on standard input, what becomes of it goes out on standard output, each as
JSON in a line. The end of standard input is the end of the order: the front is done, or dead.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TextIO

import msgspec

from service.settings import Settings

PATIENCE_SECONDS = 5.0
"""What engines may take to be placed before the front is told that they wait."""
WATCH_SECONDS = 2.0
"""Between two looks at whether the cluster still knows of the engines."""
LEAVE_SECONDS = 20.0
"""What taking them down may take."""


class Order(msgspec.Struct, frozen=True):
    """What a front wants placed."""

    settings: Settings
    engine_command: Sequence[str] | None = None
    """Replaces the engine, for tests."""


class Connected(msgspec.Struct, frozen=True, tag="connected"):
    """The cluster answers."""


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """Not all engines have a place yet."""

    num_placed: int
    each_needs: dict[str, float]
    cluster_has: dict[str, float]


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    """Every engine runs."""

    nodes: list[str]
    """Of each engine; Ray's ids."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The order cannot be carried out."""

    reason: str


Message = Connected | Waiting | Placed | Failed
Say = Callable[[Message], None]


class RayDriver:
    """As many actors as engines are wanted, in one placement group. Raises ValueError for what cannot be done."""

    def __init__(self, order: Order, say: Say, over: threading.Event) -> None:
        """`over` is set when nobody wants the engines any more."""
        self.connected = threading.Event()
        self._settings = order.settings
        self._command = order.engine_command
        self._say = say
        self._over = over
        self._actors: list[Any] = []
        self._group: Any = None

    def connect(self) -> None:
        """To the cluster. May take minutes where there is none."""
        try:
            import ray
        except ImportError as error:
            raise ValueError("ray is not installed; the extra `ray` brings it: pip install 'forerun[ray]'") from error
        pool = self._settings.pool
        try:
            ray.init(
                pool.ray,
                namespace=self._name,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ValueError(f"ray is {pool.ray!r}, and no cluster can be used there: {error}") from error
        self.connected.set()
        self._say(Connected())

    def place(self) -> None:
        """The engines. Waits until all of them run, or until it is over."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from service.pool.ray_engine import RayEngine

        pool = self._settings.pool
        bundle = self._bundle(ray.cluster_resources())
        self._group = self._placement_group(bundle)
        actor = ray.remote(RayEngine)
        self._actors = [
            actor.options(
                name=f"engine-{index}",
                get_if_exists=True,
                lifetime="detached" if pool.ray_keep else None,
                max_restarts=-1,
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group),
            ).remote(self._settings, self._command)
            for index in range(pool.engines)
        ]
        self._await_all([each.node.remote() for each in self._actors], bundle)

    def watch(self) -> None:
        """Wait until it is over. Where the cluster has no head, Ray waits for one, and ends this process in the end.

        Raises ValueError if there is a head that knows nothing of the engines: another one, or the same with nothing in
        its memory. Ray itself would go on with it, and never place them again.
        """
        from ray.util import get_placement_group

        while not self._over.wait(WATCH_SECONDS):
            try:
                get_placement_group(self._name)
            except ValueError as error:
                raise ValueError("the cluster has another head, which knows nothing of the engines") from error

    def leave(self) -> None:
        """Take the engines down, unless they are to be kept."""
        import ray
        from ray.util import remove_placement_group

        if not self._settings.pool.ray_keep:
            for actor in self._actors:
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)
        ray.shutdown()

    @property
    def _name(self) -> str:
        return f"forerun-{self._settings.pool.namespace}"

    def _bundle(self, available: dict[str, float]) -> dict[str, float]:
        """What one engine is given: a GPU where there are any, unless it is to run on a CPU."""
        device = self._settings.engine.device
        if device == "cuda" or (device == "auto" and available.get("GPU")):
            return {"GPU": 1, "CPU": 1}
        return {"CPU": 1}

    def _placement_group(self, bundle: dict[str, float]) -> Any:
        """A place for each engine. Those that an earlier front has kept are taken over."""
        from ray.util import get_placement_group, placement_group

        pool = self._settings.pool
        try:
            kept = get_placement_group(self._name)
        except ValueError:
            return placement_group(
                [bundle] * pool.engines,
                strategy=pool.ray_strategy.upper(),
                name=self._name,
                lifetime="detached" if pool.ray_keep else None,
            )
        if kept.bundle_count != pool.engines:
            raise ValueError(
                f"engines is {pool.engines}, and an earlier front has kept {kept.bundle_count} in the Ray cluster: ask "
                "for as many, or have them taken down by a front with that number and without ray_keep"
            )
        return kept

    def _await_all(self, nodes: list[Any], bundle: dict[str, float]) -> None:
        import ray

        waits_since, pending, is_told = time.monotonic(), nodes, False
        while pending:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=1.0)
            if self._over.is_set():
                return
            if pending and not is_told and time.monotonic() - waits_since > PATIENCE_SECONDS:
                has = {name: ray.cluster_resources().get(name, 0.0) for name in ("CPU", "GPU")}
                self._say(Waiting(len(nodes) - len(pending), bundle, has))
                is_told = True
        self._say(Placed([self._node(each) for each in nodes]))

    @staticmethod
    def _node(answer: Any) -> str:
        import ray

        try:
            return str(ray.get(answer))
        except ray.exceptions.ActorUnavailableError:
            return "(restarting)"
        except ray.exceptions.RayActorError as error:
            raise ValueError(f"a node of the Ray cluster cannot run an engine: {error}") from error


def main() -> int:
    """Carry out one order; the exit status."""
    output = _messages()

    def say(message: Message) -> None:
        with suppress(BrokenPipeError):
            output.write(msgspec.json.encode(message).decode() + "\n")
            output.flush()

    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    over = threading.Event()
    driver = RayDriver(order, say, over)
    threading.Thread(target=_watch, args=(over, driver.connected), name="order", daemon=True).start()
    try:
        driver.connect()
        driver.place()
        driver.watch()
    except ValueError as error:
        say(Failed(str(error)))
        return 1
    driver.leave()
    return 0


def _messages() -> TextIO:
    """Standard output, for messages alone: what else writes there goes to standard error."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return output


def _watch(over: threading.Event, connected: threading.Event) -> None:
    """Thread: wait for the end of the order. Whatever Ray is doing then has an end, too."""
    while os.read(0, 1):  # unbuffered: a buffer's lock would outlive the interpreter
        pass
    over.set()
    if connected.is_set():
        time.sleep(LEAVE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
