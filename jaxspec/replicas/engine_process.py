"""An engine's process, as seen from the one that started it, and the devices that each of several has."""

from __future__ import annotations

import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.options import ConfigError
from jaxspec.engine.async_llm import EngineDead
from jaxspec.parallel.channel import Channel
from jaxspec.replicas.prefix_affinity import Prefixes

log = logging.getLogger("jaxspec")

QUIET_SECONDS = 5.0  # without a word from an engine, which reports four times a second, after which it may be stuck


class EngineProcess:
    """One engine (`jaxspec.replicas.engine_worker`) and the channel to it.

    A thread reads what it sends: `deliver` is called with its deltas, and `lost` once it is gone.

    **Attributes:** `stats`, its latest figures; `held`, completions given to it and not ended; `error`, why it is gone.
    """

    def __init__(
        self, index: int, env: dict[str, str], deliver: Callable[[list], None], lost: Callable[[EngineProcess], None]
    ):
        ours, theirs = socket.socketpair()
        level = logging.getLogger("jaxspec").getEffectiveLevel()
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # a drafter's module is found there too
        bars = "0" if index else "1"  # one engine's are enough
        command = [sys.executable, "-m", "jaxspec.replicas.engine_worker", str(theirs.fileno()), str(level), bars]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=os.environ | env | path)
        theirs.close()
        self.index, self.channel = index, Channel(ours)
        self.stats: dict[str, Any] = {}
        self.devices: list[str] = []
        self.error: str | None = None
        self.held = self.given = 0
        self.prefixes = Prefixes(0)
        self._deliver, self._lost = deliver, lost
        self._heard = time.monotonic()
        self._started: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name=f"jaxspec-engine-{index}", daemon=True).start()

    def started(self, kind: str) -> Any:
        """Read the next message of its start, of this kind. **Raises:** the error that kept it from starting."""
        got, value = self._started.get()
        if got == kind:
            return value
        if kind == "devices" and not isinstance(value, ConfigError | EngineDead):
            value = ConfigError(f"engine {self.index} of --dp-size found no device to run on: {value}")
        raise value

    def send(self, kind: str, value: Any) -> bool:
        """Send it a message. False: it is gone."""
        try:
            self.channel.send(pickle.dumps((kind, value), pickle.HIGHEST_PROTOCOL))
        except OSError:
            return False
        return True

    @property
    def step_seconds(self) -> float:
        """How long its step has run, as `AsyncLLM.step_seconds`; a process that doesn't speak is in one."""
        silent = time.monotonic() - self._heard
        return self.stats.get("step_seconds", 0.0) + (silent if silent > QUIET_SECONDS else 0.0)

    def figures(self) -> dict[str, Any]:
        """Its `stats`, the latest that it has sent, and how it is."""
        there = self.error is None
        state = {"engine": self.index, "devices": self.devices, "error": self.error, "held": self.held}
        how = {"ready": there and self.stats["ready"], "step_seconds": self.step_seconds if there else 0.0}
        return self.stats | state | how

    def end(self, why: str) -> None:
        """End its process at once."""
        self.error = self.error or why
        self.process.kill()

    def wait(self, seconds: float) -> bool:
        """Whether its process ends by itself in this time. It is ended if not."""
        try:
            self.process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            self.end("it didn't end in time")
            self.process.wait()
            return False
        return True

    def _read(self) -> None:
        try:
            while True:
                kind, value = pickle.loads(self.channel.receive())
                self._heard = time.monotonic()
                match kind:
                    case "deltas":
                        self._deliver(value)
                    case "stats":
                        self.stats = value
                    case "log":
                        level, name, text = value
                        logging.getLogger(name).log(level, "engine %d: %s", self.index, text)
                    case "died":
                        self.error = value
                    case _:
                        self._started.put((kind, value))
        except (EOFError, OSError):
            pass
        except Exception as error:  # a message of another version, say; nothing more of it can be understood
            log.critical("engine %d can't be understood any more", self.index, exc_info=error)
            self.process.kill()
        self.channel.close()
        self.error = self.error or _ending(self.process.wait())
        self._started.put(("failed", EngineDead(f"engine {self.index} of --dp-size didn't start: {self.error}")))
        self._lost(self)


def _ending(status: int) -> str:
    """How a process ended that nobody told to."""
    if status >= 0:
        return f"its process ended with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    return f"{name} ended its process" + (", perhaps for lack of memory" if -status == signal.SIGKILL else "")


def devices_of_each(engines: int, size: int) -> list[dict[str, str]]:
    """For each engine, the environment variable that shows it the `size` GPUs that are its own.

    **Raises:** `ConfigError` if $CUDA_VISIBLE_DEVICES has too few. Without it, the engines find out.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if os.environ.get("JAX_PLATFORMS") == "cpu" or given == "":
        return [{}] * engines
    names = list(map(str, range(engines * size))) if given is None else [name.strip() for name in given.split(",")]
    if len(names) < engines * size:
        raise ConfigError(
            f"--dp-size {engines} with --tp-size {size} takes {engines * size} GPUs; CUDA_VISIBLE_DEVICES={given} has "
            f"{len(names)}"
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(names[i * size : (i + 1) * size])} for i in range(engines)]


def check_devices(found: list[tuple[str, list[str]]], options: EngineConfig) -> None:
    """**Raises:** `ConfigError` unless all engines found devices of one kind, and as many as they need.

    `found`: of each, jax's platform and its devices. On a CPU all engines share it.
    """
    needed, platforms = options.dp_size * options.tp_size, {platform for platform, _ in found}
    for index, (platform, devices) in enumerate(found):
        if len(platforms) > 1 or (platform != "cpu" and len(devices) < options.tp_size):
            all_found = sum(len(devices) for each, devices in found if each != "cpu")
            raise ConfigError(
                f"--dp-size {options.dp_size} with --tp-size {options.tp_size} takes {needed} GPUs; the engines found "
                f"{all_found}, and engine {index} {', '.join(devices)}"
            )
