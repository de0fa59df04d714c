"""The engine for callers: `LLM` generates for a list of prompts, `AsyncLLM` streams to many callers at once."""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import secrets
import signal
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from jaxspec.config import EngineConfig
from jaxspec.engine import Engine, Request
from jaxspec.request import Completion, Delta, RequestError, RequestMetrics, RequestOutput, SamplingParams

log = logging.getLogger("jaxspec")

LONG_PROMPT = 20_000  # characters; tokenising more than this would hold up the event loop


class EngineDead(RuntimeError):
    """The engine loop has stopped; the cause is chained."""


class LLM:
    """Generate offline.

    **Arguments:** `model` and `draft` as the server's `--model` and `--draft`; further options are the server's flags
    with underscores (see `EngineConfig`).

    `engine.tokenizer` is the model's, with `apply_chat_template(messages)` for a chat's token ids (None if the
    checkpoint has none); `engine.stats()` has the figures that `/server_info` reports.

    **Raises:** `ConfigError`, `CheckpointError` or `TokenizerError` for options or files that can't work.
    """

    def __init__(self, model: str = "smollm2-135m-instruct", draft: str = "none", **engine_options: Any):
        self.engine = Engine(EngineConfig.from_options(model=model, draft=draft, **engine_options))
        self._turn = threading.Lock()  # the engine's: calls from several threads wait for one another

    def generate(
        self,
        prompts: str | list[int] | list[str] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete a prompt or several: strings, or lists of token ids used as they are. One output each, in order.

        Calls from several threads take turns; to serve many callers at once, use `AsyncLLM`.

        `params` holds for all prompts, or is a list with one for each; None is `SamplingParams()` with what the
        checkpoint's generation_config.json says.

        **Raises:** `RequestError`, before anything runs if any prompt can't be served. Ctrl-C takes effect after the
        step that runs (pressed again, at once): the call's requests are aborted, and the next call finds the engine as
        if they had never been.
        """
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if params is None:
            params = SamplingParams(**self.engine.sampling)
        settings = params if isinstance(params, list | tuple) else [params] * len(prompts)
        if bad := [each for each in settings if not isinstance(each, SamplingParams)]:
            raise RequestError(
                f"params must be SamplingParams, or a list with one for each prompt, got {bad[0]!r}", "params"
            )
        if len(settings) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(settings)} sampling params", "params")
        requests = [self.engine.prepare(p, s) for p, s in zip(prompts, settings, strict=True)]
        gathered = {request.id: [Gathered(i) for i in range(request.params.n)] for request in requests}
        with self._turn, _Interrupts() as interrupts:
            try:
                for request in requests:
                    self.engine.add(request)
                while self.engine.busy:
                    for delta in self.engine.step():
                        gathered[delta.request_id][delta.index].take(delta)
                    interrupts.deliver()
            finally:  # an interrupt in mid-flight leaves the engine clean
                aborted = [request for request in requests if self.engine.abort(request.id)]
                if aborted:  # the prefix tree may name pages whose prefill was planned and not dispatched
                    self.engine.flush_cache()
                self.engine.settle()
        return [_output(request, gathered[request.id]) for request in requests]


class _Interrupts:
    """Holds back what a Ctrl-C does (SIGINT's handler) until `deliver`: in the midst of a step it could lose the state
    that a program has just been given. A second one isn't held back.

    Python interrupts the main thread alone, so in others there is nothing to hold back.
    """

    def __enter__(self) -> _Interrupts:
        self._held: tuple[Any, ...] | None = None
        self._handler = signal.getsignal(signal.SIGINT)
        self._holds = threading.current_thread() is threading.main_thread() and callable(self._handler)
        if self._holds:
            signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, *_: object) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, self._handler)
        self.deliver()

    def _hold(self, *received: Any) -> None:
        if self._held is not None:
            self.deliver()
        self._held = received

    def deliver(self) -> None:
        """Do now what was held back, if anything was."""
        received, self._held = self._held, None
        if received is not None:
            self._handler(*received)


class Gathered:
    """One completion put together from its deltas."""

    def __init__(self, index: int):
        self.completion = Completion(index)
        self.metrics: RequestMetrics | None = None
        self._text: list[str] = []

    def take(self, delta: Delta) -> None:
        done = self.completion
        self._text.append(delta.text)
        done.token_ids += delta.token_ids
        if delta.logprobs is not None:
            done.logprobs = (done.logprobs or []) + delta.logprobs
        if delta.token_sources is not None:
            done.token_sources = (done.token_sources or []) + delta.token_sources
        if delta.finish_reason is not None:
            done.text = "".join(self._text)
            done.finish_reason, done.stop_reason, self.metrics = delta.finish_reason, delta.stop_reason, delta.metrics


def _output(request: Request, gathered: list[Gathered]) -> RequestOutput:
    metrics = RequestMetrics(prompt_tokens=len(request.tokens))
    each = [g.metrics for g in gathered]
    metrics.queue = min(m.queue for m in each)
    metrics.ttft = min(m.ttft for m in each)
    metrics.latency = max(m.latency for m in each)
    metrics.cached_tokens = each[0].cached_tokens
    for name in ("output_tokens", "verify_rounds", "verified_tokens", "preemptions", "drafted_tokens"):
        setattr(metrics, name, sum(getattr(m, name) for m in each))
    metrics.acceptance_histogram = [sum(counts) for counts in zip(*(m.acceptance_histogram for m in each), strict=True)]
    return RequestOutput(
        request_id=request.id,
        prompt=request.prompt,
        prompt_token_ids=request.tokens,
        completions=[g.completion for g in gathered],
        metrics=metrics,
        prompt_logprobs=request.prompt_logprobs,
    )


@dataclass(eq=False, slots=True)
class _Stream:
    """Where somebody waits for the engine. `begun`: it has taken the request; what came before was of another, whom
    the same id belonged to."""

    loop: asyncio.AbstractEventLoop
    arrived: asyncio.Queue
    begun: bool = False


class AsyncLLM:
    """Generate for many callers on an event loop; the engine runs in a thread of its own. Arguments as `LLM`'s.

    **Attributes:** `config`, the options with what was left to the machine filled in; `model_config`; `tokenizer`, or
    None; `error`, what the engine loop failed with, or None.
    """

    def __init__(self, model: str = "smollm2-135m-instruct", draft: str = "none", **engine_options: Any):
        self.engine = Engine(EngineConfig.from_options(model=model, draft=draft, **engine_options))
        self.config = self.engine.config
        self.model_config = self.engine.model_config
        self.tokenizer = self.engine.tokenizer
        self.error: BaseException | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="jaxspec-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # before jax ends, which aborts a process where a program still runs

    async def generate(
        self, prompt: str | list[int], params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[Delta]:
        """Stream one request's deltas, all completions interleaved. Closing the iterator aborts the request.

        **Raises:** `RequestError` at the first iteration for a request that can't be served; `EngineDead`.
        """
        if isinstance(prompt, str) and len(prompt) > LONG_PROMPT:
            request = await asyncio.to_thread(self.engine.prepare, prompt, params, request_id)
        else:
            request = self.engine.prepare(prompt, params, request_id)
        if request.id in self._streams:
            raise RequestError(f"request id {request.id!r} is in use", "request_id")
        stream = self._streams[request.id] = _Stream(asyncio.get_running_loop(), asyncio.Queue())
        unfinished = params.n
        try:
            self._call(lambda: self._begin(request, stream))
            while unfinished:
                delta = await stream.arrived.get()
                if isinstance(delta, BaseException):
                    raise EngineDead("the engine has stopped") from delta
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            self._streams.pop(request.id, None)
            if unfinished and self.error is None and not self._closed:
                self._call(lambda: self.engine.abort(request.id))

    async def flush_cache(self) -> bool:
        """Empty the prefix tree. False, and nothing done, while requests run.

        **Raises:** `EngineDead`.
        """
        loop, answer, key = asyncio.get_running_loop(), asyncio.Queue(), f"flush {secrets.token_hex(8)}"
        self._streams[key] = _Stream(loop, answer)  # as a request's, so that a failure of the engine reaches it
        try:
            self._call(lambda: _wake(loop, [(answer, self.engine.flush_cache())]))
            done = await answer.get()
        finally:
            del self._streams[key]
        if isinstance(done, BaseException):
            raise EngineDead("the engine has stopped") from done
        return done

    def stats(self) -> dict[str, Any]:
        """Figures since start, and whether requests can be served now."""
        return self.engine.stats() | {"ready": self.error is None and not self._closed}

    def close(self) -> None:
        """Stop the engine thread and wait for its end. Unfinished requests end with `EngineDead`.

        A program that ends without it has it called then.
        """
        atexit.unregister(self.close)
        if not self._closed:
            self._closed = True
            self._calls.put(None)
        self._thread.join()

    def _call(self, function: Callable[[], None]) -> None:
        """Have the engine thread run `function` before its next step."""
        if self.error is not None or self._closed:
            raise EngineDead("the engine has stopped") from self.error
        self._calls.put(function)

    def _begin(self, request: Request, stream: _Stream) -> None:
        self.engine.add(request)
        stream.begun = True

    def _run(self) -> None:
        try:
            while self._take_calls():
                self._deliver(self.engine.step())
            self._fail(EngineDead("the engine was closed"))
            self.engine.settle()
        except BaseException as error:
            log.critical("the engine loop failed; no request can be served any more", exc_info=error)
            self.error = error
            self._fail(error)

    def _take_calls(self) -> bool:
        """Run what callers asked for, waiting for something to do. False: close."""
        while True:
            try:
                call = self._calls.get(block=not self.engine.busy)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()

    def _deliver(self, deltas: list[Delta]) -> None:
        """Hand a step's deltas over with one wake-up per event loop."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue, Any]]] = {}
        for delta in deltas:
            if (stream := self._streams.get(delta.request_id)) and stream.begun:
                batches.setdefault(stream.loop, []).append((stream.arrived, delta))
        for loop, batch in batches.items():
            _wake(loop, batch)

    def _fail(self, error: BaseException) -> None:
        for stream in list(self._streams.values()):
            _wake(stream.loop, [(stream.arrived, error)])


def _wake(loop: asyncio.AbstractEventLoop, batch: list[tuple[asyncio.Queue, Any]]) -> None:
    def put():
        for deltas, item in batch:
            deltas.put_nowait(item)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:  # the loop was closed with its callers; nobody is listening
        log.debug("dropped %d deltas of a closed event loop", len(batch))
