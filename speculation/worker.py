"""The engine process: `python -m speculation.worker --socket PATH --settings JSON`.

It connects to the front's Unix socket, loads, says `Ready`, and then alternates between taking commands and stepping.
Where the device works by itself, what a step brought is told while the next one runs.
A second thread only reads the socket, and a third only says that the process is alive; everything else happens in this
one, so the engine needs no lock.
"""

from __future__ import annotations

import os

# Before torch loads its thread pool, whose threads spin while they wait. Left alone they take the cores from everybody
# else (a step ten times as long on a busy machine); not spinning at all makes a step 1.7 times as long on a quiet one.
# So many turns are about a tenth of a millisecond, which loses neither.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import argparse
import ctypes
import gc
import logging
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import structlog

from speculation.assembly import assemble
from speculation.engine import Engine
from speculation.framing import FrameReader, FramingError, encode_frame
from speculation.log_format import LogFormat, line_processors
from speculation.messages import (
    Abort,
    Alive,
    BlocksChanged,
    Command,
    Drain,
    Event,
    Loading,
    Prefer,
    Ready,
    Rejected,
    SequenceOutput,
    StepOutputs,
    Submit,
)
from speculation.settings import EngineSettings
from speculation.step_report import StepResult
from target.start_phases import LOGGER_NAME

PR_SET_PDEATHSIG = 1
STATS_SECONDS = 0.25
"""At most so often the front is told gauges, totals and which blocks came and went."""


class Worker:
    """One engine and its connection to the front. When the front goes away, so does the worker."""

    def __init__(
        self, connection: socket.socket, engine: Engine, *, check_invariants: bool, heartbeat_seconds: float
    ) -> None:
        self._connection = connection
        self._heartbeat_seconds = heartbeat_seconds
        self._sending = threading.Lock()
        self._engine = engine
        self._check_invariants = check_invariants
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._draining = False
        self._untold: StepResult | None = None
        """What the newest step brought, while nobody has been told."""
        self._stats_at = 0.0
        self._log = structlog.get_logger("engine")

    def run(self) -> None:
        """Serve until the front closes the connection, or everything is done after `Drain`."""
        threading.Thread(target=self._read, name="front-reader", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        while self._take_commands():
            if self._engine.has_work:
                self._step()
                if self._check_invariants:
                    self._engine.check()
            elif self._draining:
                break

    def _step(self) -> None:
        """One step; the one before it, if it is still untold, is told as soon as the device has something to do."""
        step = self._engine.launch()
        self._tell()
        self._untold = self._engine.settle(step)
        if not (self._engine.overlaps and self._engine.has_work):
            self._tell()

    def _read(self) -> None:
        """Thread: commands from the socket into the queue; None when there will be no more."""
        reader: FrameReader[Command] = FrameReader(Command)
        try:
            while data := self._connection.recv(1 << 16):
                for command in reader.feed(data):
                    self._commands.put(command)
        except (OSError, FramingError) as error:
            self._log.warning("front connection lost", reason=str(error))
        finally:  # whatever ended the thread: an engine that hears nothing must not look alive
            self._commands.put(None)

    def _beat(self) -> None:
        """Thread: say now and then that the process is alive, whatever the other threads do."""
        try:
            while True:
                time.sleep(self._heartbeat_seconds)
                self._send(Alive())
        except OSError:
            pass  # the reader has seen it, too

    def _take_commands(self) -> bool:
        """Handle what has come in, waiting for it when there is nothing else to do. False when the front is gone."""
        if not self._engine.has_work and not self._draining:
            self._engine.check()
            self._send_stats(now=True)
            if not self._handle(self._commands.get()):
                return False
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return True
            if not self._handle(command):
                return False

    def _handle(self, command: Command | None) -> bool:
        match command:
            case None:
                return False
            case Submit():
                refusal = self._refusal_of(command)
                if refusal is not None:
                    self._send(refusal)
            case Abort(request_id):
                self._tell()
                output = self._engine.abort(request_id)
                if output is not None:
                    self._send_outputs([output])
            case Drain():
                self._draining = True
            case Prefer(identities):
                self._engine.pool.prefer(identities)
        return True

    def _refusal_of(self, request: Submit) -> Rejected | None:
        if self._draining:
            return Rejected(request_id=request.request_id, code="draining", message="the engine is being shut down")
        return self._engine.submit(request)

    def _tell(self) -> None:
        if self._untold is not None:
            result, self._untold = self._untold, None
            self._send_outputs(self._engine.report(result))
            self._send_stats()

    def _send_outputs(self, outputs: list[SequenceOutput]) -> None:
        """Send a step's outputs, in halves where all of them do not fit in one frame: logprobs of prompts are long."""
        if not outputs:
            return
        try:
            self._send(StepOutputs(outputs))
        except FramingError as error:
            half = len(outputs) // 2
            if half == 0:
                self._refuse(outputs[0].request_id, error)
                return
            self._send_outputs(outputs[:half])
            self._send_outputs(outputs[half:])

    def _refuse(self, request_id: str, error: FramingError) -> None:
        """End a sequence whose output does not fit in a frame; the others go on."""
        self._log.error("output not sent", request=request_id, reason=str(error))
        self._commands.put(Abort(request_id))  # for when no step is under way
        message = f"the answer cannot be sent ({error}); ask for fewer logprobs"
        self._send(Rejected(request_id=request_id, code="invalid", message=message, param="logprobs"))

    def _send_stats(self, *, now: bool = False) -> None:
        clock = time.monotonic()
        if now or clock - self._stats_at >= STATS_SECONDS:
            self._stats_at = clock
            self._send(self._engine.stats())
            stored, evicted = self._engine.pool.drain_changes()
            if stored or evicted:
                self._send(BlocksChanged(stored, evicted))

    def _send(self, event: Event) -> None:
        frame = encode_frame(event)
        with self._sending:
            self._connection.sendall(frame)


def end_with_parent() -> None:
    """Have the kernel end this process with the one that started it: stopped, it would see no connection end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class StandardLogs(logging.Handler):
    """A handler that gives records of the standard library's `logging` to structlog, so that they are JSON lines, too.

    The event is the message, and `logger` the name of the module or library that it is from.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Log one record; structlog knows the standard levels only, and others count as the next lower one."""
        try:
            level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)
            structlog.get_logger().log(level, record.getMessage(), logger=record.name, exc_info=record.exc_info)
        except Exception:  # noqa: BLE001  a line that cannot be logged ends nobody, as in `logging`'s own handlers
            self.handleError(record)


def configure_logs(level: str, log_format: LogFormat) -> None:
    """Lines on stderr, also from `logging`; its debug lines, thousands for a compilation, are left out."""
    threshold = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(handlers=[StandardLogs()], level=max(threshold, logging.INFO), force=True)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *line_processors(log_format),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


class PhaseReports(logging.Handler):
    """A handler that tells the front what the engine does while it loads."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        """Send one phase; a front that is gone is noticed by what follows."""
        with suppress(OSError):
            self._connection.sendall(encode_frame(Loading(phase=record.getMessage())))


@contextmanager
def phases_reported(connection: socket.socket) -> Iterator[None]:
    """Phases of loading go to the front, and not into this process's own log."""
    logger, handler = logging.getLogger(LOGGER_NAME), PhaseReports(connection)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Refused(Exception):
    """Settings, or the files they name, cannot be served; the message says which and why."""


def _assemble(settings: EngineSettings) -> tuple[Engine, Ready]:
    try:
        return assemble(settings)
    except (ValueError, OSError) as error:
        raise _Refused(str(error)) from error


def main(argv: list[str] | None = None) -> int:
    """Run one engine until its front is gone. Exit status 1 if it could not load or a step failed."""
    parser = argparse.ArgumentParser(prog="python -m speculation.worker", description=__doc__)
    parser.add_argument("--socket", required=True, help="Unix socket the front listens on")
    parser.add_argument("--settings", required=True, help="EngineSettings as JSON")
    arguments = parser.parse_args(argv)
    end_with_parent()
    settings = msgspec.json.decode(arguments.settings, type=EngineSettings)
    configure_logs(settings.log_level, settings.log_format)
    log = structlog.get_logger("engine")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(arguments.socket)
            with phases_reported(connection):
                engine, ready = _assemble(settings)
            # What is loaded stays: a full collection would walk over all of it in the middle of a step.
            gc.collect()
            gc.freeze()
            log.info("engine loaded", description=ready.description, blocks=ready.num_blocks, methods=ready.methods)
            connection.sendall(encode_frame(ready))
            Worker(
                connection,
                engine,
                check_invariants=settings.check_invariants,
                heartbeat_seconds=ready.heartbeat_seconds,
            ).run()
    except BrokenPipeError:
        log.info("front gone")
    except _Refused as refusal:
        log.error("engine refused", reason=str(refusal))
        log.debug("engine refused", exc_info=refusal)
        return 1
    except Exception as error:
        log.exception("engine failed", reason=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
