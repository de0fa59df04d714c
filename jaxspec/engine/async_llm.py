"""The engine for many callers: `AsyncLLM` streams to each (`engine.llm` has the one that takes a list of prompts).

Invariant: every caller that waits for the engine hears from it. A request ends with its last delta or with one of the
errors below, also when its step fails, takes too long, or never returns.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import queue
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax

from jaxspec.compiling.programs import settle
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.json_values import shown
from jaxspec.config.options import ConfigError
from jaxspec.config.request import Delta, LogitsError, RequestError, SamplingParams, of_prompt
from jaxspec.engine.admission import Request
from jaxspec.engine.engine import Engine
from jaxspec.images.picture import Prompt
from jaxspec.parallel.hosts import Leader

log = logging.getLogger("jaxspec")

LONG_PROMPT = 20_000  # characters; tokenising more than this would hold up the event loop
MAX_UNREAD = 4096  # deltas that wait for one caller; a request whose caller reads slower than that is aborted
QUIET_SECONDS = 0.2  # without a request, after which what is left of a start in stages is done
CLOSE_SECONDS = 10.0  # that `close` waits for the step that runs
EXIT_SECONDS = 120.0  # that it waits at the end of a program that didn't call it


class EngineDead(RuntimeError):
    """The engine loop has stopped; the cause is chained."""


class RequestFailed(RuntimeError):
    """A request that began and can't be finished, while the engine continues. Its own cause, if any, is chained."""


class RequestTimeout(RequestFailed):
    """A request that took longer than `request_timeout` allows."""


class Overloaded(RuntimeError):
    """Refusal of a request while `max_queued_requests` others wait. Nothing of it is kept, so send it again later."""


@dataclass(eq=False, slots=True)
class Stream:
    """A caller that waits for the engine. `begun`: the engine has taken the request; earlier deltas were another
    request's with the same id. `sent` is counted by the engine's thread, `taken` by the caller's. `member`: of several
    engines, the one that serves it, `name` the request's id."""

    loop: asyncio.AbstractEventLoop
    arrived: asyncio.Queue
    begun: bool = False
    sent: int = 0
    taken: int = 0
    member: Any = None
    name: str = ""

    def expire(self, seconds: float | None) -> asyncio.TimerHandle | None:
        """End the request with `RequestTimeout` after so many seconds, unless the timer is cancelled; None: never."""
        if seconds is None:
            return None
        late = RequestTimeout(
            f"the request took longer than the {seconds:g} seconds that the server allows (--request-timeout)"
        )
        return self.loop.call_later(seconds, self.arrived.put_nowait, late)

    def counted(self, item: Any) -> Any:
        """Count an item as sent. A delta too many that is unread becomes the request's failure, and ends the stream."""
        self.sent += 1
        if self.sent - self.taken <= MAX_UNREAD or not isinstance(item, Delta) or item.finish_reason is not None:
            return item
        self.begun = False
        return RequestFailed(f"{MAX_UNREAD} deltas are unread, so the request was aborted")


def hand_over(items: Iterable[tuple[Stream, Any]]) -> None:
    """Hand items to their callers, from any thread, with one wake-up per event loop. A closed loop gets none."""
    batches: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Any]]] = {}
    for stream, item in items:
        batches.setdefault(stream.loop, []).append((stream, item))
    for loop, batch in batches.items():

        def put(batch=batch):
            for stream, item in batch:
                stream.arrived.put_nowait(item)

        try:
            loop.call_soon_threadsafe(put)
        except RuntimeError:  # the loop was closed with its callers; nobody is listening
            log.debug("dropped %d deltas of a closed event loop", len(batch))


class Admitted:
    """Count of completions that were taken in and haven't ended, `held`, for several event loops.

    **Raises:** `ConfigError` for a number of those that may wait that is negative.
    """

    def __init__(self, most_queued: int | None):
        if most_queued is not None and most_queued < 0:
            raise ConfigError(f"--max-queued-requests must be at least 0, got {most_queued}")
        self.queued = math.inf if most_queued is None else most_queued
        self.held = self.refused = 0
        self.counting = threading.Lock()

    def reserve(self, n: int, slots: int, flags: str = "--max-running-requests") -> None:
        """Take `n` more in. **Raises:** `Overloaded`, unless they would be the only ones."""
        with self.counting:
            if self.held and self.held + n > (most := slots + self.queued):
                self.refused += 1
                raise Overloaded(
                    f"{self.held} completions run or wait, and the server takes in {most} at once "
                    f"({flags} and --max-queued-requests); send the request again later"
                )
            self.held += n

    def release(self, n: int) -> None:
        with self.counting:
            self.held -= n


def check_params(params: Any) -> None:
    """**Raises:** `RequestError` for what are no `SamplingParams`."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params must be SamplingParams, got {shown(params)}", "params")


class AsyncLLM:
    """Generate for many callers on an event loop; the engine runs in a thread of its own. Arguments as `LLM`'s, and:

    - `max_queued_requests`: completions that may wait for a slot; None bounds nothing. The next is refused.
    - `request_timeout`: seconds that a request may take in all; None bounds nothing.
    - `staged_start`: be ready once the programs that serve most requests are compiled, one size of each, and compile
      the others meanwhile. Until they are there rounds are slower, and have `num_draft_tokens` drafts whatever the
      load; a request with a grammar or `prompt_logprobs` waits until its own are.
    - `hosts`: the other nodes that run the model, `jaxspec.parallel.hosts.join`'s. Once one is lost, so is the engine.
    - `watchdog_timeout`: seconds after which a step counts as stuck, compiling excluded: see `stuck`.

    A step that fails ends its own requests and no others: the engine drops them, makes its state anew and continues. It
    ends for good if that fails, or if the next step fails before any request has finished.

    **Attributes:** `config`, the options with what was left to the machine filled in; `model_config`; `tokenizer`, or
    None; `sampling`, the checkpoint's own settings; `image_reader`, how it takes pictures, or None, and then
    `no_pictures` says why; `devices`, in words; `error`, what the engine loop ended with, or None.

    `jaxspec.replicas.data_parallel.DataParallelLLM` has the same methods and runs several engines.
    """

    def __init__(
        self,
        model: str = "smollm2-135m-instruct",
        draft: str = "none",
        *,
        max_queued_requests: int | None = None,
        request_timeout: float | None = None,
        watchdog_timeout: float = 300.0,
        staged_start: bool = False,
        hosts: Leader | None = None,
        **engine_options: Any,
    ):
        self._admitted = Admitted(max_queued_requests)
        options = EngineConfig.from_options(model=model, draft=draft, **engine_options)
        self.engine = Engine(options, staged_start=staged_start and hosts is None, hosts=hosts)
        self.config = self.engine.config
        self.model_config = self.engine.model_config
        self.tokenizer, self.sampling = self.engine.tokenizer, self.engine.sampling
        self.image_reader, self.no_pictures = self.engine.image_reader, self.engine.no_pictures
        self.error: BaseException | None = None
        self.request_timeout, self.watchdog_timeout = request_timeout, watchdog_timeout
        self._failures = 0
        self._shaken = False  # a step has failed, and no request has finished since
        self._step_began: float | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._early: list[tuple[Request, Stream]] = []  # whose programs a start in stages has still to bring
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="jaxspec-engine", daemon=True)
        self._thread.start()
        self._hosts = hosts
        if hosts is not None:
            hosts.when_lost = self.give_up
        # Before jax ends, which aborts a process where a program still runs.
        atexit.register(self.close, EXIT_SECONDS)

    async def generate(
        self,
        prompt: str | list[int] | Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        client: str = "",
        priority: int = 0,
        lora: str | None = None,
    ) -> AsyncIterator[Delta]:
        """Stream one request's deltas, all completions interleaved. Closing the iterator aborts the request. Prompts of
        several clients, each known by a key, `client`, are computed in equal shares. `priority` says who goes first,
        by `schedule_policy`. `lora`: the name of its adapter.

        **Raises:** `Overloaded`, `Busy`, or `RequestError` for a request that can't be served, at the first iteration;
        `RequestFailed` or its `RequestTimeout` at a later one; `EngineDead`.
        """
        check_params(params)
        self._admitted.reserve(params.n, self.config.max_running_requests)
        unfinished, stream, timer = params.n, None, None
        try:
            if params.structured is not None:
                await self.engine.compiled(params.structured)
            given = prompt, params, request_id, client, priority, lora
            if params.structured is not None or (isinstance(prompt, str) and len(prompt) > LONG_PROMPT):
                request = await asyncio.to_thread(self.engine.prepare, *given)
            else:
                request = self.engine.prepare(*given)
            mine = Stream(asyncio.get_running_loop(), asyncio.Queue())
            if self._streams.setdefault(request.id, mine) is not mine:
                raise RequestError(f"request id {request.id!r} is in use", "request_id")
            stream = mine
            self._call(lambda: self._begin(request, stream))
            timer = stream.expire(self.request_timeout)
            while unfinished:
                delta = await stream.arrived.get()
                stream.taken += 1
                if isinstance(delta, RequestFailed):
                    raise delta
                if isinstance(delta, BaseException):
                    raise EngineDead("the engine has stopped") from delta
                if isinstance(delta.error, RequestError):
                    raise delta.error
                if delta.error is not None:
                    known = isinstance(delta.error, LogitsError)
                    why = f": {delta.error}" if known else f" on {type(delta.error).__name__}"
                    raise RequestFailed(f"request {request.id} failed{why}") from delta.error
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            if timer is not None:
                timer.cancel()
            if stream is not None:
                if unfinished and self.error is None and not self._closed:
                    self._calls.put(lambda: self._abort(request.id))
                del self._streams[request.id]  # the id is free only behind the abort, which would end its next owner
            self._admitted.release(params.n)

    async def check(self, requests: Sequence[tuple[str | list[int] | Prompt, SamplingParams]]) -> None:
        """Check prompts, each with its params.

        **Raises:** `RequestError` for the first that can't be served, whose `param` is as of `of_prompt`; `Busy`.
        """
        for wanted in dict.fromkeys(params.structured for _, params in requests if params.structured is not None):
            await self.engine.compiled(wanted)
        for number, each in enumerate(requests):
            with of_prompt(number):
                self.engine.check(*each)

    @property
    def devices(self) -> list[str]:
        return described_devices()

    @property
    def adapters(self) -> dict[str, str]:
        """The folders of the adapters that are loaded, by name."""
        return {} if self.engine.runner.adapters is None else self.engine.runner.adapters.loaded

    def abort(self, request_id: str | None = None) -> None:
        """End a request, or all: each of its completions gets a last delta with the finish reason "abort".

        An id that no request has is ignored. **Raises:** `EngineDead`.
        """
        ids = list(self._streams) if request_id is None else [request_id]
        self._call(lambda: self._deliver([delta for each in ids for delta in self._abort(each)]))

    async def flush_cache(self) -> bool:
        """Empty the prefix tree. False, and nothing done, while requests run.

        **Raises:** `EngineDead`.
        """
        return await self._ask(self.engine.flush_cache)

    async def control(self, action: str, **given: Any) -> dict[str, Any]:
        """Update weights, pause, or give memory back, while requests run. Returns the engine's state after it.

        `action` with what it takes, each as of `Rollout`'s method of that name, or as of `LLM.update_weights`:

        - "update": `target`, `draft`, `version`, `flush`, and `abort`, to end all requests first.
        - "rename": `version`. "pause": `mode`. "resume". "release" and "restore": `tags`. "state": nothing.
        - "load_adapter": as `LLM.load_adapter`. "unload_adapter": `name`.

        **Raises:** `RequestError`, `ConfigError` or `CheckpointError` for what can't be done; `EngineDead`.
        """
        rollout = self.engine.rollout
        if action in ("load_adapter", "unload_adapter"):
            adapters = self.engine.adapters
            await asyncio.to_thread(getattr(adapters, action.removesuffix("_adapter")), **given)
            return rollout.figures() | {"requests": len(self.engine.requests)}
        counted = lambda: len(self.engine.requests)  # noqa: E731
        requests = await self._ask(counted)
        if action == "update":
            wanted = given.get("target"), given.get("draft"), given.get("version")
            update = await asyncio.to_thread(rollout.prepare, *wanted)
            if given.get("abort"):
                self.abort()
            await self._ask(lambda: rollout.update(update, given.get("flush", False)))
        elif action == "pause":
            await self._ask(lambda: self._delivered(rollout.pause(given["mode"])))
        elif action == "release":
            await self._ask(lambda: self._deliver(rollout.release(given["tags"])))
        elif action == "restore":
            await self._ask(lambda: rollout.restore(given["tags"]))
        elif action != "state":
            await self._ask(lambda: {"rename": rollout.rename, "resume": rollout.resume}[action](**given))
        return rollout.figures() | {"requests": requests}

    def _delivered(self, paused: tuple[Future, list[Delta]]) -> Future:
        self._deliver(paused[1])
        return paused[0]

    async def _ask(self, function: Callable[[], Any]) -> Any:
        """Result of `function` in the engine's thread, or of the future that it returns.

        **Raises:** what it raises; `EngineDead`.
        """
        stream, key = Stream(asyncio.get_running_loop(), asyncio.Queue()), f"ask {secrets.token_hex(8)}"
        self._streams[key] = stream  # as a request's, so that a failure of the engine reaches it
        asked: Future = Future()

        def call() -> None:
            try:
                done = function()
            except Exception as error:
                asked.set_exception(error)
            else:
                if isinstance(done, Future):
                    done.add_done_callback(lambda done: hand_over([(stream, done)]))
                    return
                asked.set_result(done)
            hand_over([(stream, asked)])

        try:
            self._call(call)
            done = await stream.arrived.get()
        finally:
            del self._streams[key]
        if isinstance(done, BaseException):
            raise EngineDead("the engine has stopped") from done
        return done.result()

    def stats(self) -> dict[str, Any]:
        """Figures since start, and whether requests can be served now."""
        return self.engine.stats() | {
            "ready": self.error is None and not self._closed and not self.stuck,
            "step_seconds": self.step_seconds,
            "refused_total": self._admitted.refused,
            "engine_failures_total": self._failures,
        }

    @property
    def step_seconds(self) -> float:
        """Seconds that the current step has run, compiling excluded; 0 while there is none."""
        began, programs = self._step_began, self.engine.runner.programs
        return 0.0 if began is None or programs.compiling else time.monotonic() - max(began, programs.compiled_at)

    @property
    def stuck(self) -> bool:
        """Whether the current step has run for longer than `watchdog_timeout`."""
        return self.step_seconds > self.watchdog_timeout

    def give_up(self, error: BaseException) -> None:
        """Stop waiting for an engine that doesn't return: unfinished requests end with `EngineDead`."""
        self.error = error
        self._fail(error)

    def close(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Stop the engine thread and wait for its end. Unfinished requests end with `EngineDead`.

        False: its step still runs after `timeout` seconds. A program that ends without it has it called then.
        """
        atexit.unregister(self.close)
        if not self._closed:
            self._closed = True
            self._calls.put(None)
            self.engine.runner.programs.stop()
            if self.engine.grammars is not None:
                self.engine.grammars.close()
        self._thread.join(timeout)
        if ended := not self._thread.is_alive():
            if self.engine.host_cache is not None:
                self.engine.host_cache.close()
            if self._hosts is not None:
                self._hosts.close()
            return ended
        log.warning("the engine's step, or its compiling, didn't end within %g seconds: ending now", timeout)
        self._fail(EngineDead("the engine was closed"))
        return ended

    def _call(self, function: Callable[[], None]) -> None:
        """Have the engine thread run `function` before its next step."""
        if self.error is not None or self._closed:
            raise EngineDead("the engine has stopped") from self.error
        self._calls.put(function)

    def _abort(self, request_id: str) -> list[Delta]:
        early, self._early = self._early, []
        for request, stream in early:
            self._begin(request, stream, now=request.id == request_id)
        return self.engine.abort(request_id)

    def _begin(self, request: Request, stream: Stream, now: bool = False) -> None:
        """Hand a request to the engine: `now`, or once its programs are there. Others go first until then."""
        scores, grammars = request.params.prompt_logprobs is not None, request.matchers is not None
        runner, adapted = self.engine.runner, request.adapter is not None
        lacks_tower = request.pictures is not None and runner.lacks_tower
        if not now and (lacks_tower or runner.programs.lacks(scores, grammars, adapted)):
            self._early.append((request, stream))
            return
        try:
            self.engine.add(request)
        except Exception as error:
            log.error("request %s can't be admitted; other requests continue", request.id, exc_info=error)
            failed = RequestFailed(f"the engine couldn't admit request {request.id}: {error}")
            hand_over([(stream, failed)])
        else:
            stream.begun = True

    def _begin_early(self) -> None:
        early, self._early = self._early, []
        for each in early:
            self._begin(*each)

    def _run(self) -> None:
        try:
            while self.error is None:
                try:
                    if not self._take_calls():
                        break
                    self._begin_early()
                    self._step_began = time.monotonic()
                    self._deliver(self.engine.step())
                except Exception as error:
                    self._recover(error)
                finally:
                    self._step_began = None
            self._fail(EngineDead("the engine was closed"))
            settle(self.engine.runner)
        except BaseException as error:
            log.critical("the engine loop failed; no request can be served any more", exc_info=error)
            self.error = error
            self._fail(error)

    def _recover(self, error: Exception) -> None:
        """End the requests of a step that raised `error`, and restart the engine. **Raises:** `error` if it can't."""
        self._failures += 1
        if self._shaken or self.engine.runner.hosts is not None:  # nobody knows how far other hosts are
            raise error
        self._shaken = True
        log.error("a step failed: its requests end with an error, and the engine restarts", exc_info=error)
        try:
            self.engine.recover()
        except Exception as second:
            log.error("the engine can't restart", exc_info=second)
            raise error from second
        for stream in list(self._streams.values()):
            if stream.begun:
                stream.begun = False
                lost = RequestFailed(f"the engine failed on {type(error).__name__} during this request; send it again")
                lost.__cause__ = error
                hand_over([(stream, lost)])

    def _take_calls(self) -> bool:
        """Run what callers asked for, waiting for something to do. False: close."""
        while True:
            starting = self.engine.runner.starting
            try:
                call = self._calls.get(
                    block=not self.engine.busy, timeout=QUIET_SECONDS if starting or self._early else None
                )
            except queue.Empty:
                self._begin_early()
                if starting:
                    self.engine.complete_start()
                if self.engine.busy:
                    return True
                continue
            if call is None:
                return False
            call()

    def _deliver(self, deltas: list[Delta]) -> None:
        """Hand a step's deltas over."""
        items = []
        for delta in deltas:
            self._shaken &= delta.finish_reason in (None, "error", "abort")
            if (stream := self._streams.get(delta.request_id)) and stream.begun:
                items.append((stream, stream.counted(delta)))
                if not stream.begun:
                    self.engine.abort(delta.request_id)
        hand_over(items)

    def _fail(self, error: BaseException) -> None:
        hand_over([(stream, error) for stream in list(self._streams.values())])


def described_devices() -> list[str]:
    """The devices that this process sees, of all hosts, in words."""
    return [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()]
