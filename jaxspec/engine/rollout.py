"""Weights that change, pauses, and memory that is given back, under an engine that has requests.

Requests and updates stand in one line, in the order they came. An update waits until those before it have finished, and
those behind it wait for the update. So each text is of one version, and none is lost. A pause stops the engine where it
is, and an update is then made at once: requests that were retracted or kept go on under the new weights.

Invariant: a page is found again by requests of its own version alone. The prefix tree's keys are salted with a mark of
the version, and a sequence that goes on with pages of an older one publishes no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from jaxspec.config.options import ConfigError
from jaxspec.config.request import FIRST_VERSION, Delta, RequestError
from jaxspec.engine.admission import Request
from jaxspec.engine.weights import Update, applied, check_follows, moved, read, read_folders

MODES = ("abort", "retract", "in_place", "wait")
TAGS = ("kv_cache", "weights")


@dataclass
class Waiting:
    """An update, or a pause, that waits for the requests before it. `done` gets what it comes to."""

    run: Callable[[], Any]
    done: Future = field(default_factory=Future)


class Rollout:
    """Line between an engine's callers and its scheduler. Run by the engine's thread; `engine` is an `Engine`.

    **Attributes:** `version`, the name of the weights; `paused`, the mode of a pause, or None; `released`, the tags of
    what has been given back.
    """

    def __init__(self, engine: Any):
        self._engine, self._line = engine, deque[Request | Waiting]()
        self.version, self._updates = FIRST_VERSION, 0
        self.paused: str | None = None
        self.released: set[str] = set()
        self._places: Any = None  # shardings of weights that are on the host

    @property
    def stopped(self) -> bool:
        """Whether nothing may be dispatched."""
        return self.paused is not None or bool(self.released)

    @property
    def due(self) -> int:
        """How many updates and pauses stand in line."""
        return sum(isinstance(each, Waiting) for each in list(self._line))

    def figures(self) -> dict[str, Any]:
        """Figures for `Engine.stats`."""
        standing = sum(len(each.choices) for each in list(self._line) if isinstance(each, Request))
        return {
            "weight_version": self.version,
            "updates": self._updates + self.due,
            "paused": self.paused,
            "released": sorted(self.released),
            "num_waiting": len(self._engine.scheduler.waiting) + standing,
        }

    def enter(self, request: Request) -> None:
        """Hand a request to the scheduler, or let it stand in line."""
        if self.stopped or self._line:
            self._line.append(request)
        else:
            self._schedule(request)

    def leave(self, request: Request) -> None:
        """Take a request out of the line, if it stands there."""
        if request in self._line:
            self._line.remove(request)
            for choice in request.choices:
                self._engine.scheduler.withdraw(choice.seq)

    def move(self) -> bool:
        """Let those in line go on as far as they may. Returns whether anything may be dispatched."""
        while self._line and not self.stopped:
            head = self._line[0]
            if isinstance(head, Waiting) and self._engine.scheduler.unfinished:
                break
            self._line.popleft()
            if isinstance(head, Waiting):
                _finish(head)
            else:
                self._schedule(head)
        return not self.stopped

    def prepare(self, target: Any, drafter: Any, version: str | None) -> Update:
        """Make an update of pytrees, or of folders' names, as `LLM.update_weights` takes them. Any thread may call it.

        **Raises:** `CheckpointError`, `ConfigError`, `RequestError`.
        """
        runner, config = self._engine.runner, self._engine.config
        if runner.hosts is not None:
            raise ConfigError("weights can't be updated on several hosts; start the nodes again with the new ones")
        self._check_present()
        if version is not None and not isinstance(version, str):
            raise RequestError(f"version must be a string, got {version!r}", "version")
        if target is not None:
            check_follows(runner.draft, config)
        made = read_folders if isinstance(drafter if target is None else target, str | Path) else read
        return replace(made(runner.model, runner.draft, config, target, drafter), version=version)

    def update(self, update: Update, flush: bool = False) -> Future:
        """Change the weights: at once in a pause or where nothing runs, else once what runs has finished."""
        engine = self._engine
        waiting = Waiting(lambda: self._apply(update, flush))
        if self.stopped or not (self._line or engine.scheduler.unfinished):
            _finish(waiting)
        else:
            self._line.append(waiting)
        return waiting.done

    def rename(self, version: str) -> None:
        """Call the weights this from now on. Pages stay."""
        self.version = version

    def pause(self, mode: str) -> tuple[Future, list[Delta]]:
        """Stop. Requests that come meanwhile stand in line.

        `mode`: "abort" ends all requests with what they have; "retract" takes their pages, which are computed
        again when they go on; "in_place" leaves all as it is; "wait" stops once those that came before have finished.
        """
        if mode not in MODES:
            raise RequestError(f"mode must be one of {', '.join(MODES)}, got {mode!r}", "mode")
        deltas: list[Delta] = []
        waiting = Waiting(lambda: self._pause(mode))
        if mode == "wait" and not self.stopped and (self._line or self._engine.scheduler.unfinished):
            self._line.append(waiting)
            return waiting.done, deltas
        if mode == "abort":
            deltas = [delta for each in list(self._engine.requests) for delta in self._engine.abort(each)]
        else:
            self._engine.read_all(deltas)
        if mode == "retract":
            self._engine.scheduler.retract()
        _finish(waiting)
        return waiting.done, deltas

    def resume(self) -> None:
        """End a pause. **Raises:** `RequestError` while memory is given back."""
        if self.released:
            raise RequestError(f"{' and '.join(sorted(self.released))} are released; resume them first", "tags")
        self.paused = None

    def release(self, tags: list[str] | None) -> list[Delta]:
        """Give memory back: "kv_cache", all pages and slots; "weights", which move to the host's memory; None: both.

        Requests that run are retracted. **Raises:** `RequestError` for other tags, or in a pause that keeps pages;
        `ConfigError` on several hosts.
        """
        wanted = self._tags(tags) - self.released
        deltas: list[Delta] = []
        if self._engine.runner.hosts is not None:
            raise ConfigError("memory can't be released on several hosts; stop the nodes instead")
        if self.paused == "in_place" and "kv_cache" in wanted and self._engine.scheduler.unfinished:
            raise RequestError("requests are paused in place and keep their pages; pause with the mode retract", "tags")
        self._engine.read_all(deltas)
        runner = self._engine.runner
        if "kv_cache" in wanted:
            self._engine.scheduler.retract()
            self._engine.scheduler.flush()
            runner.release_state()
        if "weights" in wanted:
            self._places = {}
            model, draft = moved(runner.model, runner.draft, self._to_host)
            runner.set_weights(model, draft)
        self.released |= wanted
        return deltas

    def restore(self, tags: list[str] | None) -> None:
        """Undo `release`. Requests go on unless there is a pause. **Raises:** `RequestError` for other tags."""
        wanted, runner = self._tags(tags) & self.released, self._engine.runner
        if "weights" in wanted:
            model, draft = moved(runner.model, runner.draft, self._to_device)
            runner.set_weights(model, draft)
            self._places = None
        if "kv_cache" in wanted:
            runner.reset()
        self.released -= wanted

    def _to_host(self, array: Any) -> Any:
        host = jax.device_get(array)
        self._places[id(host)] = array.sharding
        return host

    def _to_device(self, array: Any) -> Any:
        return jax.device_put(array, self._places[id(array)]) if id(array) in self._places else array

    def _tags(self, tags: list[str] | None) -> set[str]:
        if isinstance(tags, str) or (bad := [tag for tag in tags or () if tag not in TAGS]):
            given = tags if isinstance(tags, str) else bad[0]
            raise RequestError(f"tags must be a list of some of {', '.join(TAGS)}, got {given!r}", "tags")
        return set(TAGS if tags is None else tags)

    def _pause(self, mode: str) -> None:
        self.paused = mode

    def _check_present(self) -> None:
        if "weights" in self.released:
            raise RequestError("the weights are released; resume them before they are updated", "tags")

    def _apply(self, update: Update, flush: bool) -> None:
        self._check_present()
        engine, runner = self._engine, self._engine.runner
        runner.set_weights(*applied(runner.model, runner.draft, engine.config, update))
        before, self._updates = self._updates, self._updates + 1
        self.version = update.version or f"{FIRST_VERSION}-{self._updates}"
        engine.scheduler.change_version(_mark(before) ^ _mark(self._updates))
        if engine.host_cache is not None:
            engine.host_cache.know_weights()
        if flush:
            engine.scheduler.flush()

    def _schedule(self, request: Request) -> None:
        for choice in request.choices:
            choice.seq.salt ^= _mark(self._updates)
            self._engine.scheduler.add(choice.seq)


def _finish(waiting: Waiting) -> None:
    try:
        waiting.done.set_result(waiting.run())
    except Exception as error:
        waiting.done.set_exception(error)


def _mark(version: int) -> int:
    """A key of 64 bits for a version; that of the first is 0, which leaves keys as they are."""
    return version * 0x9E3779B97F4A7C15 % 2**64
