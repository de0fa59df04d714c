"""The engine for one caller: `LLM` generates for a list of prompts (`async_llm` streams to many callers)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxspec.checkpoint import Model
from jaxspec.compiling.programs import settle
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.json_values import shown
from jaxspec.config.options import ConfigError, as_python
from jaxspec.config.request import Completion, Delta, RequestError, RequestMetrics, RequestOutput, SamplingParams
from jaxspec.drafters.loading import LoadedDrafter
from jaxspec.engine.admission import Request
from jaxspec.engine.engine import Engine
from jaxspec.images.chats import local_media, named, no_vision, separate
from jaxspec.images.picture import Prompt
from jaxspec.text.errors import TokenizerError


class LLM:
    """Generate offline.

    **Arguments:** `model` and `draft` as the server's `--model` and `--draft`, or as `load_model` and `load_drafter`
    return them; further options are the server's flags with underscores (see `EngineConfig`).

    `engine.tokenizer` is the model's (None if the checkpoint has none); `engine.stats()` has the figures that
    `/server_info` reports.

    **Raises:** `ConfigError`, `CheckpointError` or `TokenizerError` for options or files that can't work.
    """

    def __init__(
        self,
        model: str | Model = "smollm2-135m-instruct",
        draft: str | LoadedDrafter = "none",
        **engine_options: Any,
    ):
        model, draft = as_python(model), as_python(draft)
        for name, value, loaded in (("model", model, Model), ("draft", draft, LoadedDrafter)):
            if not isinstance(value, str | loaded):
                raise ConfigError(
                    f"{name} must be a name, a path, or a {loaded.__name__}, which jaxspec.load_"
                    f"{'model' if loaded is Model else 'drafter'} returns, got {type(value).__name__}"
                )
        given = model if isinstance(model, Model) else None, draft if isinstance(draft, LoadedDrafter) else None
        names = (each.name if loaded else each for each, loaded in zip((model, draft), given, strict=True))
        options = EngineConfig.from_options(**dict(zip(("model", "draft"), names, strict=True)), **engine_options)
        self.engine = Engine(options, *given)
        self._turn = threading.Lock()  # the engine's: calls from several threads wait for one another

    def generate(
        self,
        prompts: str | list[int] | Prompt | list[str] | list[list[int]] | list[Prompt],
        params: SamplingParams | list[SamplingParams] | None = None,
        priority: int | list[int] = 0,
        lora: str | list[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or several: strings, lists or arrays of token ids used as they are, or `Prompt`s with
        pictures. One output each, in order.

        Calls from several threads take turns; to serve many callers at once, use `AsyncLLM`.

        `params` holds for all prompts, or is a list with one for each; None is `SamplingParams()` with what the
        checkpoint's generation_config.json says. `priority`, of all or one for each, says who goes first, by
        `schedule_policy`. `lora`: the name of an adapter, of all or one for each; None is the model itself.

        **Raises:** `RequestError`, before anything runs if any prompt can't be served. Ctrl-C takes effect after the
        step that runs (pressed again, at once): the call's requests are aborted, and the next call finds the engine as
        if they had never been.
        """
        prompts, priority = as_python(prompts), as_python(priority)
        if isinstance(prompts, str | Prompt):
            prompts = [prompts]
        if not isinstance(prompts, list | tuple):
            raise RequestError(
                f"prompts must be a string, a list of token ids, or a list of either, got {shown(prompts)}", "prompts"
            )
        if prompts and isinstance(as_python(prompts[0]), int):
            prompts = [prompts]
        if params is None:
            params = SamplingParams(**self.engine.sampling)
        settings = params if isinstance(params, list | tuple) else [params] * len(prompts)
        if bad := [each for each in settings if not isinstance(each, SamplingParams)]:
            raise RequestError(
                f"params must be SamplingParams, or a list with one for each prompt, got {bad[0]!r}", "params"
            )
        if len(settings) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts but {len(settings)} sampling params; give one for each prompt, or one for all",
                "params",
            )
        each_of = lambda value: value if isinstance(value, list | tuple) else [value] * len(prompts)  # noqa: E731
        priorities, adapters = each_of(priority), each_of(lora)
        for given, what, param in ((priorities, "priorities", "priority"), (adapters, "adapters", "lora")):
            if len(given) != len(prompts):
                raise RequestError(
                    f"{len(prompts)} prompts but {len(given)} {what}; give one for each prompt, or one for all", param
                )
        if self.engine.rollout.stopped:
            raise RequestError("the engine's memory is released; call resume_memory first", "prompts")
        requests = []
        for number, given in enumerate(zip(prompts, settings, priorities, adapters, strict=True)):
            prompt, each, first, adapter = given
            with _of_several(number, len(prompts)):
                requests.append(self.engine.prepare(prompt, each, priority=first, lora=adapter))
        builders = {request.id: [CompletionBuilder(i) for i in range(request.params.n)] for request in requests}
        with self._turn, Interrupts() as interrupts:
            try:
                for request in requests:
                    self.engine.add(request)
                while self.engine.busy:
                    for delta in self._step():
                        if delta.error is not None:
                            raise delta.error
                        builders[delta.request_id][delta.index].take(delta)
                    interrupts.deliver()
            finally:  # an interrupt in mid-flight leaves the engine clean
                aborted = [request for request in requests if self.engine.abort(request.id)]
                if aborted:  # the prefix tree may name pages whose prefill was planned and not dispatched
                    self.engine.flush_cache()
                settle(self.engine.runner)
        return [_output(request, builders[request.id]) for request in requests]

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        params: SamplingParams | list[SamplingParams] | None = None,
        priority: int | list[int] = 0,
        lora: str | list[str | None] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one chat or several, as the model's own template writes them. One output each, in order.

        `messages`: a chat is a list of messages, `{"role": "user", "content": "Hi"}`. A content with pictures is a list
        of parts, `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}`: a path, a file's bytes, a PIL
        image, an array u8[height, width, 3] or a data: URL. `params`, `priority` and `lora` as `generate`'s.
        `template`: of `Tokenizer.apply_chat_template`: `tools`, `continue_final_message` with
        `add_generation_prompt=False`, and variables of the template, such as `enable_thinking=False`.

        **Raises:** as `generate`; `TokenizerError` if the template refuses the messages, or there is none.
        """
        if self.engine.tokenizer is None:
            raise TokenizerError(f"{self.engine.config.model} has no tokenizer, so it can't be given a chat")
        chats = [messages] if isinstance(messages, list) and messages and isinstance(messages[0], dict) else messages
        if not (isinstance(chats, list | tuple) and all(isinstance(chat, list | tuple) for chat in chats)):
            raise RequestError(
                'messages must be a list of {"role": ..., "content": ...}, or a list of such lists, got '
                f"{shown(messages)}",
                "messages",
            )
        written = []
        for number, chat in enumerate(chats):
            if not chat or not all(isinstance(message, Mapping) for message in chat):
                where = "messages" if chats is not messages else f"messages[{number}]"
                raise RequestError(
                    f'{where} must be a list of at least one {{"role": ..., "content": ...}}, got {shown(chat)}', where
                )
            written.append(self._prompt(chat, template))
        return self.generate(written, params, priority, lora)

    def _prompt(self, chat: list[Any], template: dict[str, Any]) -> list[int] | Prompt:
        """A chat's token ids, with its pictures if it has some."""
        messages, media = separate(chat)
        tokenizer, reader = self.engine.tokenizer, self.engine.image_reader
        if not media:
            return tokenizer.apply_chat_template(chat, **template)
        if reader is None:
            raise no_vision(self.engine.no_pictures, media[0].where)
        room, read = self.engine.config.context_length, []
        for each in media:
            try:
                read.append(reader.read_media(local_media(each), each, room))
            except RequestError as error:
                raise named(error, each.where) from error
            room -= read[-1].tokens
        ids = tokenizer.encode(reader.write(tokenizer, messages, read, **template), add_special_tokens=False)
        return Prompt(*reader.place(ids, read))

    def update_weights(self, target: Any = None, draft: Any = None, version: str | None = None) -> str:
        """Change the weights of the target, the drafter, or both. Returns the version, `version` or a new name.

        `target`: a pytree like `engine.runner.model.params`; a mapping of Hugging Face names to arrays, which may have
        some of them; or a folder's path. `draft`: a mapping of some of `engine.runner.draft.params`, or a folder's
        path. What a drafter borrows of its target follows it. Arrays of the engine's dtype and sharding are taken by
        reference, so don't donate them afterwards. Others are cast, moved, and quantised as the engine's are.

        **Raises:** `CheckpointError` naming what doesn't fit, `ConfigError` for an engine that can't be updated; then
        the weights stay as they were.
        """
        with self._turn:
            rollout = self.engine.rollout
            rollout.update(rollout.prepare(target, draft, version)).result()
            return rollout.version

    def load_adapter(self, name: str, path: str, replace: bool = False) -> None:
        """Read a LoRA adapter, a folder that PEFT wrote. `generate` then takes it by this name. `replace`: it may be in
        use, by another adapter.

        **Raises:** `CheckpointError` naming what can't be served, `RequestError`, `ConfigError` for an engine without
        room for adapters.
        """
        self.engine.adapters.load(name, path, replace)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. **Raises:** as `load_adapter`."""
        self.engine.adapters.unload(name)

    def release_memory(self, tags: list[str] | None = None) -> None:
        """Give memory back until `resume_memory`: "kv_cache", "weights" (which move to the host), or both.

        **Raises:** `RequestError` for other tags.
        """
        with self._turn:
            self.engine.rollout.release(tags)

    def resume_memory(self, tags: list[str] | None = None) -> None:
        """Undo `release_memory`. **Raises:** `RequestError` for other tags."""
        with self._turn:
            self.engine.rollout.restore(tags)

    def _step(self) -> list[Delta]:
        """One step of the engine. A step that fails leaves it without requests, as if there had been none."""
        try:
            return self.engine.step()
        except Exception:
            self.engine.recover()
            raise


@contextmanager
def _of_several(number: int, several: int) -> Iterator[None]:
    """Let an error name its prompt, where there are several."""
    try:
        yield
    except RequestError as error:
        if several == 1:
            raise
        raise RequestError(f"prompts[{number}]: {error}", error.param, error.code) from error


class CompletionBuilder:
    """Puts one completion together from its deltas."""

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
            done.hidden_states, done.routed_experts = delta.hidden_states, delta.routed_experts


def _output(request: Request, builders: list[CompletionBuilder]) -> RequestOutput:
    """A request's completions with figures of all of them: the first token's time, the sum of rounds."""
    metrics = RequestMetrics(prompt_tokens=len(request.tokens))
    each = [builder.metrics for builder in builders]
    metrics.queue = min(m.queue for m in each)
    metrics.ttft = min(m.ttft for m in each)
    metrics.latency = max(m.latency for m in each)
    for name in ("cached_tokens", "cached_on_host", "cached_on_disk", "weight_version"):
        setattr(metrics, name, getattr(each[0], name))
    for name in ("output_tokens", "verify_rounds", "verified_tokens", "preemptions", "drafted_tokens"):
        setattr(metrics, name, sum(getattr(m, name) for m in each))
    metrics.acceptance_histogram = [sum(counts) for counts in zip(*(m.acceptance_histogram for m in each), strict=True)]
    return RequestOutput(
        request_id=request.id,
        prompt=request.prompt,
        prompt_token_ids=request.tokens,
        completions=[builder.completion for builder in builders],
        metrics=metrics,
        prompt_logprobs=request.prompt_logprobs,
    )


class Interrupts:
    """Delays the effect of a Ctrl-C (SIGINT's handler) until `deliver`: in the midst of a step it could lose the state
    that a program has just been given. A second Ctrl-C isn't delayed.

    Python interrupts the main thread alone, so in others there is nothing to delay.
    """

    def __enter__(self) -> Interrupts:
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
        """Deliver the delayed interrupt, if there is one."""
        received, self._held = self._held, None
        if received is not None:
            self._handler(*received)
