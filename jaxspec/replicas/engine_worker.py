"""One engine of several, in a process of its own: `python -m jaxspec.replicas.engine_worker FD LOG_LEVEL BARS`.

`engine_process` starts it, with the socket FD; BARS 0 shows no progress bars. It ends when told to, when its
engine has failed for good, and as soon as the process that started it is gone. Signals of the terminal are that
process's business.

Messages are pickled pairs `(kind, value)`; both processes are of one program, and the socket has no name that others
could connect to. Deltas of a step travel together.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from contextlib import aclosing, suppress
from functools import partialmethod
from typing import Any

import jax
from tqdm import tqdm

from jaxspec.cache.memory_plan import claim_device
from jaxspec.checkpoint import CheckpointError
from jaxspec.config.lazy_transformers import spare_torch
from jaxspec.config.options import ConfigError
from jaxspec.config.request import Busy, Delta, RequestError
from jaxspec.engine.async_llm import AsyncLLM, EngineDead, RequestFailed, described_devices
from jaxspec.parallel.channel import Channel
from jaxspec.text.errors import TokenizerError

log = logging.getLogger("jaxspec")

STATS_SECONDS = 0.25  # between two reports of the figures, which take 40 us; one more before each completion's end
SWITCH_SECONDS = 0.0002  # as the server's
KNOWN = (ConfigError, CheckpointError, TokenizerError, RequestError, Busy, RequestFailed, EngineDead)


class Worker:
    """The engine's side of the channel."""

    def __init__(self, channel: Channel, level: int):
        self._channel, self._loop = channel, asyncio.new_event_loop()
        self._llm: AsyncLLM | None = None
        self._tasks: dict[int, asyncio.Task] = {}
        self._names: dict[str, asyncio.Task] = {}  # by request id
        self._out: list[tuple[int, Any]] = []  # deltas and errors of this turn of the loop
        self._ending: asyncio.Future = self._loop.create_future()
        logging.basicConfig(level=level, handlers=[_Forward(self._send)], force=True)
        for noisy in ("jax", "httpx", "urllib3", "filelock", "asyncio"):
            logging.getLogger(noisy).setLevel(logging.WARNING)

    def run(self) -> int:
        """Start the engine and serve; returns the exit status."""
        try:
            claim_device()
            self._send("devices", (jax.default_backend(), described_devices()))
            _, options = pickle.loads(self._channel.receive())
            threading.Thread(target=self._read, name="jaxspec-worker", daemon=True).start()
            self._llm = AsyncLLM(**options)
        except EOFError:
            return 1
        except Exception as error:
            if not isinstance(error, KNOWN):
                log.critical("the engine can't start", exc_info=error)
            self._send("failed", sendable(error))
            return 1
        llm = self._llm
        sys.setswitchinterval(SWITCH_SECONDS)
        gc.collect()
        gc.freeze()  # as the server does, so that nobody looks through what was loaded
        self._send("stats", llm.stats())
        names = ("config", "model_config", "sampling", "image_reader", "no_pictures", "adapters")
        self._send("ready", {name: getattr(llm, name) for name in names})
        return self._loop.run_until_complete(self._serve(llm))

    async def _serve(self, llm: AsyncLLM) -> int:
        while llm.error is None and not self._ending.done():
            self._send_stats()
            await asyncio.wait((self._ending,), timeout=STATS_SECONDS)
        ended = await asyncio.to_thread(llm.close, self._ending.result() if self._ending.done() else 1.0)
        while self._tasks:
            await asyncio.wait(self._tasks.values())
        self._flush()
        if llm.error is not None:
            self._send("died", f"{type(llm.error).__name__}: {llm.error}")
        return 0 if ended and llm.error is None else 1

    def _read(self) -> None:
        """The thread that receives. It never waits for anything else, so that the other side's sends never do."""
        try:
            while True:
                message = pickle.loads(self._channel.receive())
                self._loop.call_soon_threadsafe(self._take, *message)
        except (EOFError, OSError):
            os._exit(1)  # who started this process is gone, and nobody else reads what it makes
        except RuntimeError:  # the loop has ended, and the process with it
            return

    def _take(self, kind: str, value: Any) -> None:
        match kind:
            case "generate":
                key, *given = value
                task = self._tasks[key] = self._loop.create_task(self._generate(key, self._names.get(given[2]), *given))
                self._names[given[2]] = task
                task.add_done_callback(lambda task: self._forget(key, given[2], task))
            case "cancel":
                if value in self._tasks:
                    self._tasks[value].cancel()
            case "abort":
                self._loop.call_soon(self._abort, value)  # behind the first step of a request just begun
            case "check":
                self._answer(value[0], self._llm.check(value[1]))
            case "control":
                self._answer(value[0], self._llm.control(value[1], **value[2]))
            case "flush":
                self._answer(value, self._llm.flush_cache())
            case "close":
                if not self._ending.done():
                    self._ending.set_result(value)

    def _forget(self, key: int, name: str, task: asyncio.Task) -> None:
        del self._tasks[key]
        if self._names.get(name) is task:
            del self._names[name]

    def _abort(self, request_id: str | None) -> None:
        with suppress(EngineDead):
            self._llm.abort(request_id)

    def _answer(self, key: int, making: Any) -> None:
        async def answer() -> None:
            try:
                self._post(key, await making)
            except Exception as error:
                self._post(key, sendable(error))

        task = self._tasks[key] = self._loop.create_task(answer())
        task.add_done_callback(lambda _: self._tasks.pop(key))

    async def _generate(
        self, key: int, before: asyncio.Task | None, prompt: Any, params: Any, name: str, *whose: Any
    ) -> None:
        """Stream a request to the other side. `before` had its id, and may be being cancelled. `whose`: client,
        priority and adapter."""
        if before is not None:
            await asyncio.wait((before,))
        try:
            async with aclosing(self._llm.generate(prompt, params, name, *whose)) as deltas:
                async for delta in deltas:
                    self._post(key, brief(delta))
        except Exception as error:
            self._post(key, sendable(error))

    def _post(self, key: int, item: Any) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)  # behind the other requests that the same step woke
        self._out.append((key, item))

    def _flush(self) -> None:
        if not self._out:
            return
        out, self._out = self._out, []
        if any(type(item) is not tuple for _, item in out):
            self._send_stats()  # first: who has read the last delta finds it counted
        self._send("deltas", out)

    def _send_stats(self) -> None:
        self._send("stats", self._llm.stats())

    def _send(self, kind: str, value: Any) -> None:
        try:
            self._channel.send(pickle.dumps((kind, value), pickle.HIGHEST_PROTOCOL))
        except OSError:
            os._exit(1)  # as in `_read`


class _Forward(logging.Handler):
    """Sends log records to the process that writes the log."""

    def __init__(self, send: Any):
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))
        self._to = send

    def emit(self, record: logging.LogRecord) -> None:
        self._to("log", (record.levelno, record.name, self.format(record)))


def brief(delta: Delta) -> Delta | tuple[int, str, list[int]]:
    """A delta as it travels: of tokens alone a tuple, which is pickled in a tenth of the time."""
    if delta.finish_reason or delta.logprobs or delta.prompt_logprobs or delta.token_sources:
        return delta
    return delta.index, delta.text, delta.token_ids


def sendable(error: BaseException) -> Exception:
    """An error as the other side may have it: of a kind that it knows, without its cause."""
    if isinstance(error, KNOWN):
        error.__cause__ = error.__context__ = error.__traceback__ = None
        return error
    return RequestFailed(f"{type(error).__name__}: {error}")


def main() -> None:
    """Serve the process that started this one until it says so or is gone; ends with the worker's status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end, level, bars = map(int, sys.argv[1:])
    if not bars:
        tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)
    spare_torch()
    channel = Channel(socket.socket(fileno=end))
    status = Worker(channel, level).run()
    channel.close()
    if status:
        os._exit(status)  # a thread of a failed engine may never end


if __name__ == "__main__":
    main()
