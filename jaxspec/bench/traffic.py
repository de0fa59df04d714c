"""Traffic, alike for a server and an engine: prompts, when they may start, and how many are served at once."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from jaxspec.bench.client import Client, Reply
from jaxspec.bench.datasets import Prompt
from jaxspec.bench.results import Row
from jaxspec.config.request import SamplingParams
from jaxspec.engine.engine import Engine


@dataclass(frozen=True)
class Load:
    """`prompts[i]` may start `starts[i]` seconds after the first, when fewer than `concurrency` are being served."""

    prompts: list[Prompt]
    starts: list[float]
    concurrency: int
    params: SamplingParams

    @classmethod
    def closed(cls, prompts: list[Prompt], concurrency: int, params: SamplingParams) -> Load:
        """One whose prompts may all start as soon as there is room."""
        return cls(prompts, [0.0] * len(prompts), concurrency, params)


async def send(client: Client, load: Load, model: str) -> list[Reply]:
    """Stream every prompt's completion by `model` over HTTP; the replies, failed ones too, in the prompts' order."""
    gate = asyncio.Semaphore(load.concurrency)
    began = time.perf_counter()

    async def one(prompt: Prompt, start: float) -> Reply:
        await asyncio.sleep(began + start - time.perf_counter())
        async with gate:
            path, body = prompt.request()
            params = prompt.params(load.params)
            settings = {"model": model, "max_tokens": params.max_tokens, "temperature": params.temperature}
            if params.ignore_eos:  # no field of OpenAI's: strict servers refuse it
                settings["ignore_eos"] = True
            reply = await client.stream(path, body | settings)
        bar.update()
        return reply

    with tqdm(total=len(load.prompts), desc=f"http {load.concurrency}", unit="request", disable=None) as bar:
        return await asyncio.gather(*map(one, load.prompts, load.starts))


def serve(engine: Engine, load: Load, title: str | None = None) -> list[Reply]:
    """Run every prompt through an engine of this process. Tokenising is timed, since a server does it under load too.

    **Raises:** `RequestError` for a prompt that doesn't fit the engine.
    """
    waiting, replies = deque(zip(load.prompts, load.starts, strict=True)), {}
    began = time.perf_counter()
    with tqdm(total=len(waiting), desc=title or f"offline {load.concurrency}", unit="request", disable=None) as bar:
        while waiting or engine.busy:
            now = time.perf_counter()
            while waiting and len(engine.requests) < load.concurrency and waiting[0][1] <= now - began:
                prompt, _ = waiting.popleft()
                request = engine.prepare(prompt.ids(engine.tokenizer), prompt.params(load.params))
                engine.add(request)
                replies[request.id] = Reply(now, prompt_tokens=len(request.tokens))
            if not engine.busy:
                time.sleep(max(began + waiting[0][1] - time.perf_counter(), 0))
                continue
            deltas = engine.step()
            now = time.perf_counter()
            for delta in deltas:
                reply = replies[delta.request_id]
                if delta.token_ids and reply.arrivals[-1:] != [now]:  # one delta a round: several came at once
                    reply.arrivals.append(now)
                reply.output_tokens += len(delta.token_ids)
                reply.token_ids += delta.token_ids
                reply.text += delta.text
                reply.prompt_logprobs = reply.prompt_logprobs or delta.prompt_logprobs
                if delta.finish_reason is not None:
                    reply.ended, reply.metrics = now, delta.metrics
                    bar.update()
    return list(replies.values())


def afresh(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, concurrency: int, title: str
) -> list[Reply]:
    """Replies to prompts of token ids, `concurrency` at a time, nothing cached from before."""
    engine.flush_cache()
    return serve(engine, Load.closed([Prompt(tuple(tokens)) for tokens in prompts], concurrency, params), title)


def queue(
    engine: Engine,
    rng: np.random.Generator,
    count: int,
    length: int,
    params: SamplingParams,
    adapters: Sequence[str | None] = (None,),
) -> list[str]:
    """Add `count` requests of `length` random tokens each, all at once; their ids. They have `adapters` in turn.

    **Raises:** `RequestError` for lengths that don't fit the engine.
    """
    prompts = rng.integers(0, engine.model_config.vocab_size, (count, length))
    named = zip(prompts.tolist(), itertools.cycle(adapters), strict=False)
    requests = [engine.prepare(prompt, params, lora=lora) for prompt, lora in named]
    for request in requests:
        request.added = time.monotonic()  # checking all the others' tokens is none of its wait
        engine.add(request)
    return [request.id for request in requests]


def end(engine: Engine) -> None:
    """Abort all requests, and step until none is left."""
    for request_id in list(engine.requests):
        engine.abort(request_id)
    while engine.busy:
        engine.step()


def gained(before: Row, after: Row) -> Row:
    """Figures of a load, by the engine's statistics before and after it."""
    of = lambda name: after[name] - before[name]  # noqa: E731
    rounds = of("verify_rounds_total")
    counted = {name: of(f"{name}_total") for name in ("compiles", "cached_tokens", "preemptions")}
    return counted | {"accept_length": of("verified_tokens_total") / rounds if rounds else None}
