"""Several engines behind one object: `DataParallelLLM` has `AsyncLLM`'s methods and gives each request to one engine.

Each engine is a process of its own with its own devices (`engine_worker`). A step of an engine holds Python's
lock for most of its host time, so engines of one process would wait for one another; and a device's failure, or an
abort of XLA, ends the process that it happens in. Here it ends one engine's requests, and the others serve on.

Invariant: as of `AsyncLLM`, every caller that waits hears: from its engine, or that this one is gone.
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import itertools
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from jaxspec.checkpoint.find import resolve
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.request import Delta, RequestError, SamplingParams
from jaxspec.engine.async_llm import (
    CLOSE_SECONDS,
    EXIT_SECONDS,
    LONG_PROMPT,
    Admitted,
    EngineDead,
    RequestFailed,
    RequestTimeout,
    Stream,
    check_params,
    hand_over,
)
from jaxspec.engine.stats import together
from jaxspec.images.picture import Prompt
from jaxspec.replicas.engine_process import EngineProcess, check_devices, devices_of_each
from jaxspec.replicas.prefix_affinity import Prefixes, pages, told_apart
from jaxspec.text.errors import TokenizerError

log = logging.getLogger("jaxspec")

LOOK_SECONDS = 0.5  # between two looks at whether an engine is stuck
ALIKE = ("paths", "kernels", "memory_plan", "step_tokens")  # figures that one engine is enough for, or the sum
HURRY_SECONDS = 0.5  # of the time that `close` has, what an engine's process has to end once its engine has


class DataParallelLLM:
    """`dp_size` engines of one model, each in a process of its own on `tp_size` devices of its own.

    Arguments and methods are `AsyncLLM`'s. A request goes to the engine that has at least half of its prompt cached,
    if that one is not far busier than the others, else to the least busy. An engine that fails, or is stuck for
    `watchdog_timeout`, is ended with its requests. `error` is set once all are gone.

    **Raises:** `ConfigError`, `CheckpointError` or `TokenizerError`, as `AsyncLLM`.
    """

    def __init__(
        self,
        model: str = "smollm2-135m-instruct",
        draft: str = "none",
        *,
        dp_size: int = 2,
        max_queued_requests: int | None = None,
        request_timeout: float | None = None,
        watchdog_timeout: float = 300.0,
        staged_start: bool = False,
        **engine_options: Any,
    ):
        self._admitted = Admitted(max_queued_requests)
        options = EngineConfig.from_options(model=model, draft=draft, dp_size=dp_size, **engine_options)
        self.error: BaseException | None = None
        self.request_timeout, self.watchdog_timeout = request_timeout, watchdog_timeout
        self._streams: dict[int, Stream] = {}
        self._ids: dict[str, EngineProcess] = {}
        self._keys = itertools.count()
        self._counting = threading.Lock()  # of the lines above, and of what members hold
        self._closed = True  # until all have started
        self._members: list[EngineProcess] = []
        try:
            for index, env in enumerate(devices_of_each(options.dp_size, options.tp_size)):
                self._members.append(EngineProcess(index, env, self._deliver, self._lose))
            one = dataclasses.asdict(dataclasses.replace(options, dp_size=1))
            self._start(one | {"staged_start": staged_start, "watchdog_timeout": watchdog_timeout}, options)
        except BaseException:
            for member in self._members:
                member.end("the others didn't start")
                member.wait(CLOSE_SECONDS)
            raise
        self._slots = self.config.max_running_requests
        # How many more completions the engine with the prefix may hold than the least busy one
        self._lead = max(2, self._slots // 4)
        self._closed = False
        threading.Thread(target=self._watch, name="jaxspec-watch", daemon=True).start()
        atexit.register(self.close, EXIT_SECONDS)

    def _start(self, one: dict[str, Any], options: EngineConfig) -> None:
        found = [member.started("devices") for member in self._members]
        check_devices(found, options)
        for member, (_, devices) in zip(self._members, found, strict=True):
            member.devices = devices
            member.send("start", one)
        source = resolve(options.model, options.revision, load_format=options.load_format)
        self.tokenizer = source.files.tokenizer()  # read here too, while the engines start
        ready = [member.started("ready") for member in self._members]
        self.config: EngineConfig = dataclasses.replace(ready[0]["config"], dp_size=options.dp_size)
        self.model_config, self.sampling = ready[0]["model_config"], ready[0]["sampling"]
        self.image_reader, self.no_pictures = ready[0]["image_reader"], ready[0]["no_pictures"]
        self.adapters: dict[str, str] = ready[0]["adapters"]
        for member in self._members:
            member.prefixes = Prefixes(0 if self.config.disable_prefix_cache else member.stats["total_pages"])

    @property
    def devices(self) -> list[str]:
        return [f"engine {member.index}: {device}" for member in self._members for device in member.devices]

    async def generate(
        self,
        prompt: str | list[int] | Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        client: str = "",
        priority: int = 0,
        lora: str | None = None,
    ) -> AsyncIterator[Delta]:
        """Generate as `AsyncLLM.generate` does. Requests of an engine that is lost end with `RequestFailed`."""
        check_params(params)
        flags = "--max-running-requests of each engine"
        self._admitted.reserve(params.n, self._slots * len(self._living()), flags)
        unfinished, key, timer, name, member = params.n, None, None, request_id or secrets.token_hex(8), None
        try:
            tokens = await self._tokens(prompt)
            known = told_apart(tokens)
            chain = pages(known, self.config.page_size)
            member = self._choose(name, chain, params.n)
            key, of = next(self._keys), (asyncio.get_running_loop(), asyncio.Queue())
            stream = self._streams[key] = Stream(*of, begun=True, member=member, name=name)
            if not member.send("generate", (key, tokens, params, name, client, priority, lora)):
                stream.arrived.put_nowait(self._gone(member))
            timer = stream.expire(self.request_timeout)
            generated: list[int] = []
            while unfinished:
                delta = await stream.arrived.get()
                stream.taken += 1
                if isinstance(delta, BaseException):
                    raise self._as_ours(delta, member)
                unfinished -= delta.finish_reason is not None
                if params.n == 1:
                    generated += delta.token_ids
                yield delta
            if generated:
                member.prefixes.note(pages([*known, *generated], self.config.page_size))
        finally:
            if timer is not None:
                timer.cancel()
            if key is not None:
                del self._streams[key]
                if unfinished:
                    member.send("cancel", key)
            self._release(params.n, name, member)

    def abort(self, request_id: str | None = None) -> None:
        """Abort as `AsyncLLM.abort` does. **Raises:** `EngineDead`."""
        self._living()
        members = self._members if request_id is None else filter(None, [self._ids.get(request_id)])
        for member in members:
            member.send("abort", request_id)

    async def check(self, requests: Sequence[tuple[str | list[int] | Prompt, SamplingParams]]) -> None:
        """Check requests as `AsyncLLM.check` does, by one engine. **Raises:** `RequestError`, `EngineDead`."""
        member = min(self._living(), key=lambda member: member.held)
        for error in await self._ask([member], "check", lambda key: (key, list(requests))):
            if error is not None:
                raise self._as_ours(error, member)

    async def flush_cache(self) -> bool:
        """Flush all engines' caches as `AsyncLLM.flush_cache` does. **Raises:** `EngineDead`."""
        members = self._living()
        if self._ids:
            return False
        for member in members:
            member.prefixes.clear()
        return all(answer is True for answer in await self._ask(members, "flush", lambda key: key))

    async def control(self, action: str, **given: Any) -> dict[str, Any]:
        """Control all engines as `AsyncLLM.control` does; weights come from folders alone. **Raises:** as it does."""
        members = self._living()
        answers = await self._ask(members, "control", lambda key: (key, action, given))
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, BaseException):
                raise self._as_ours(answer, member)
            if action in ("update", "release"):
                member.prefixes.clear()
        if action == "load_adapter":
            self.adapters[given["name"]] = given["path"]
        if action == "unload_adapter":
            self.adapters.pop(given["name"], None)
        return answers[0] | {"requests": sum(each["requests"] for each in answers)}

    async def _ask(self, members: list[EngineProcess], kind: str, value: Callable[[int], Any]) -> list[Any]:
        """Ask members a question and gather their answers; an error for one that is lost meanwhile."""
        loop, keys, answers = asyncio.get_running_loop(), [next(self._keys) for _ in members], []
        streams = [Stream(loop, asyncio.Queue(), begun=True, member=member) for member in members]
        self._streams |= dict(zip(keys, streams, strict=True))
        try:
            for member, key, stream in zip(members, keys, streams, strict=True):
                if not member.send(kind, value(key)):
                    stream.arrived.put_nowait(self._gone(member))
            for stream in streams:
                answers.append(await stream.arrived.get())
        finally:
            for key in keys:
                del self._streams[key]
        return answers

    def stats(self) -> dict[str, Any]:
        """The engines' figures in sum, and each engine's under "engines"; a lost engine's count, but not its load."""
        engines = [member.figures() for member in self._members]
        lost = [each["error"] is not None for each in engines]
        total = together(engines, lost)
        return total | {
            "ready": self.error is None and not self._closed and any(each["ready"] for each in engines),
            "refused_total": self._admitted.refused,
            "engine_failures_total": total["engine_failures_total"] + sum(lost),
            "engines": [{k: v for k, v in each.items() if k not in ALIKE} for each in engines],
        }

    @property
    def step_seconds(self) -> float:
        """Seconds that the longest current step has run."""
        return max((member.step_seconds for member in self._members if member.error is None), default=0.0)

    @property
    def stuck(self) -> bool:
        """False: an engine that is stuck is ended at once, and isn't waited for."""
        return False

    def give_up(self, error: BaseException) -> None:
        """End all engines; unfinished requests end with `EngineDead`."""
        self.error = error
        for member in self._members:
            member.end(f"it was given up: {error}")

    def close(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Stop all engines. Unfinished requests end with `EngineDead`. False: one had to be killed."""
        atexit.unregister(self.close)
        self._closed, end = True, time.monotonic() + timeout
        for member in self._members:
            member.send("close", max(timeout - HURRY_SECONDS, 0.0))
        ended = [member.wait(end - time.monotonic()) for member in self._members]
        self._fail(EngineDead("the engines were closed"))
        return all(ended)

    async def _tokens(self, prompt: str | list[int] | Prompt) -> str | list[int] | Prompt:
        if isinstance(prompt, Prompt) or (isinstance(prompt, str) and self.tokenizer is None):
            return prompt  # of a text an engine will say that it has no tokenizer
        if not isinstance(prompt, str):
            return list(prompt)
        try:
            if len(prompt) > LONG_PROMPT:
                return await asyncio.to_thread(self.tokenizer.encode, prompt)
            return self.tokenizer.encode(prompt)
        except TokenizerError as error:
            raise RequestError(str(error), "prompt") from error

    def _choose(self, name: str, chain: list[int], n: int) -> EngineProcess:
        """The engine for a prompt with these pages, which then holds `n` completions more, under this id."""
        with self._counting:
            if name in self._ids:
                raise RequestError(f"request id {name!r} is in use", "request_id")
            members = self._living()
            least = min(member.held for member in members)
            near = [member for member in members if member.held <= least + self._lead]
            matched = {member: member.prefixes.matched(chain) for member in near}
            useful = lambda member: matched[member] if 2 * matched[member] >= len(chain) else 0  # noqa: E731
            chosen = max(near, key=lambda member: (useful(member), -member.held, -member.given))
            self._ids[name] = chosen
            chosen.held += n
            chosen.given += 1
            chosen.prefixes.note(chain)
            return chosen

    def _living(self) -> list[EngineProcess]:
        """**Raises:** `EngineDead` if there is none."""
        living = [member for member in self._members if member.error is None]
        if self._closed or not living:
            raise EngineDead("the engines have stopped") from self.error
        return living

    def _release(self, n: int, name: str, member: EngineProcess | None) -> None:
        self._admitted.release(n)
        if member is not None:
            with self._counting:
                member.held -= n
                del self._ids[name]

    def _deliver(self, items: list[tuple[int, Any]]) -> None:
        """Hand over what an engine's step made. Run by the engine's reading thread. The caller of a stream that is not
        `begun` any more ends it at its engine."""
        found = []
        for key, item in items:
            stream = self._streams.get(key)
            if stream is not None and stream.begun:
                found.append((stream, stream.counted(Delta(stream.name, *item) if type(item) is tuple else item)))
        hand_over(found)

    def _lose(self, member: EngineProcess) -> None:
        """An engine's process has ended. Run by its reading thread, once its channel is closed."""
        if self._closed:
            self._end_streams(member, EngineDead("the engines were closed"))
            return
        log.critical("engine %d is gone, with its requests: %s", member.index, member.error)
        if all(each.error is not None for each in self._members) and self.error is None:
            self.error = RuntimeError(f"all {len(self._members)} engines are gone, the last because {member.error}")
        self._end_streams(member, self._gone(member))

    def _end_streams(self, member: EngineProcess, error: Exception) -> None:
        hand_over([(stream, error) for stream in self._streams.copy().values() if stream.member is member])

    def _gone(self, member: EngineProcess) -> Exception:
        return RequestFailed(f"engine {member.index} stopped during this request; send it again")

    def _as_ours(self, error: BaseException, member: EngineProcess) -> BaseException:
        """An error as this object's caller has it: that of one engine isn't the end of all."""
        if isinstance(error, EngineDead) and not self._closed and self.error is None:
            error = self._gone(member)
        if isinstance(error, RequestFailed) and not isinstance(error, RequestTimeout) and self.error is not None:
            dead = EngineDead("the engines have stopped")
            dead.__cause__ = self.error
            return dead
        return error

    def _watch(self) -> None:
        """End an engine that is stuck, in a thread of its own."""
        while not self._closed and self.error is None:
            for member in self._members:
                if member.error is None and member.step_seconds > self.watchdog_timeout:
                    member.end(f"a step hadn't returned for {member.step_seconds:.0f} s (--watchdog-timeout)")
            time.sleep(LOOK_SECONDS)

    def _fail(self, error: BaseException) -> None:
        hand_over([(stream, error) for stream in self._streams.copy().values()])
