"""Requests against the engine: prompts in, deltas out, and an end to both when the client goes away.

Invariant: whatever way a handler ends (done, error, disconnect, shutdown), each engine stream that it opened is closed
before it returns, and a closed stream is an aborted request.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from jaxspec import AsyncLLM
from jaxspec.config.request import CONTEXT_EXCEEDED, Delta, RequestError
from jaxspec.engine.async_llm import LONG_PROMPT
from jaxspec.images.image_reader import ImageReader
from jaxspec.images.picture import Picture, Video
from jaxspec.text.errors import TokenizerError, TooLong
from jaxspec.text.tokenizer import Tokenizer
from server.chat.speech import Formats
from server.http.errors import describe
from server.metrics import Metrics
from server.prompt_log import Watch
from server.protocol import ChatRequest, CompletionRequest
from server.replies import Answer, Job, Prompt
from server.tracing import Trace
from server.workers import Together, Workers

Deltas = AsyncGenerator[tuple[int, Delta]]
Check = Callable[[], None]

MOST_TEXT = 8  # times what the longest tokens could spell of a context: templates drop some of a chat, not most of it

# What the event loop writes itself, in a few hundred microseconds: to hand a brief chat over would take as long.
BRIEF = 8 * 2**10  # characters of its messages, tools and variables
FEW = 32  # messages


def _encode_chats(chats: list[tuple[Tokenizer, str]]) -> list[list[int]]:
    """Token ids of texts that a chat template wrote."""
    if len(tokenizers := {id(tokenizer): tokenizer for tokenizer, _ in chats}) > 1:
        return [tokenizer.encode(text, False) for tokenizer, text in chats]
    (tokenizer,) = tokenizers.values()
    return tokenizer.encode_all([text for _, text in chats], False)


# Streams go on while texts are tokenised. A burst of brief chats is tokenised together. Texts that take long have
# threads of their own, few of them, so that ordinary ones don't wait behind them.
_brief_chats = Together(_encode_chats, 64, "jaxspec-encode")
_tokenizers = Workers(min(8, os.cpu_count() or 1), "jaxspec-tokenize")
_long_texts = Workers(2, "jaxspec-tokenize-long")


class ClientGone(Exception):
    """The client closed the connection before the response was complete."""


async def chat_prompt(
    body: ChatRequest,
    tokenizer: Tokenizer | None,
    formats: Formats,
    context: int,
    reader: ImageReader | None = None,
    media: Sequence[Picture | Video] = (),
) -> Prompt:
    """Write the messages and tools with the model's chat template, with the pictures and videos that `reader` has read.

    **Raises:** `RequestError` when the template refuses, or can't show the tools, or the text has more tokens than
    `context`.
    """
    if tokenizer is None:
        raise RequestError("this model has no tokenizer and can't chat; send token ids to /v1/completions", "messages")
    messages, tools = formats.messages(body)
    opens, variables = body.add_generation_prompt, formats.variables(body)

    # Roles are text too, and the template writes some for each message and may look at each of its variables.
    size = sum(8 + len(message["role"]) + _length(message["content"]) for message in messages) + len(str(tools or ""))
    size += sum(len(str(message.get(key, ""))) for message in messages for key in ("reasoning_content", "tool_calls"))
    if size > MOST_TEXT * context * tokenizer.measure.longest:
        raise RequestError(
            f"This model's maximum context length is {context} tokens, and a token has at most "
            f"{tokenizer.measure.longest} characters. However, the messages and tools have {size}. Shorten them",
            "messages",
            CONTEXT_EXCEEDED,
        )

    def write() -> str:
        options = {
            "tools": tools,
            "add_generation_prompt": not body.continue_final_message if opens is None else opens,
            "continue_final_message": bool(body.continue_final_message),
            **variables,
        }
        if media:
            return reader.write(tokenizer, messages, media, **options)
        return tokenizer.write_chat(messages, **options)

    size += sum(map(_weight, variables.values()))
    with refusals("messages", context):
        if size <= BRIEF and len(messages) <= FEW:
            ids = await _brief_chats.run((tokenizer, write()))
        else:
            ids = await _threads(size).run(lambda check: tokenizer.encode_within(write(), context, False, check))
        return placed(Prompt(ids), reader, media, context)


def placed(prompt: Prompt, reader: ImageReader | None, media: Sequence[Picture | Video], context: int) -> Prompt:
    """A prompt with rows for its pictures and videos.

    **Raises:** `TokenizerError` if it has no place for one, or is too long.
    """
    if not media:
        return prompt
    ids, images = reader.place(prompt.ids, media)
    if len(ids) > context:
        raise TooLong(len(ids), context)
    return Prompt(ids, prompt.echo, images)


def _length(content: str | list[dict[str, str]]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)


def _weight(variable: Any) -> int:
    """How long a template may take over a variable, in characters; a list's or an object's isn't looked into."""
    if isinstance(variable, list | dict):
        return LONG_PROMPT if variable else 1
    return len(variable) if isinstance(variable, str) else 1


async def completion_prompts(body: CompletionRequest, tokenizer: Tokenizer | None, context: int) -> list[Prompt]:
    """Tokenise what needs it.

    **Raises:** `RequestError` when text is given or asked for and there is no tokenizer, or a prompt has more tokens
    than `context`.
    """
    if tokenizer is None and (body.echo or isinstance(body.prompt[0], str)):
        raise RequestError("this model has no tokenizer; send token ids as the prompt, and no echo", "prompt")
    special = True if body.add_special_tokens is None else body.add_special_tokens

    several = len(body.prompt) > 1

    def one(number: int, given: str | list[int], check: Check) -> Prompt:
        check()
        with refusals(f"prompt[{number}]" if several else "prompt", context):
            if isinstance(given, str):
                return Prompt(tokenizer.encode_within(given, context, special, check), given if body.echo else None)
            if len(given) > context:
                raise TooLong(len(given), context)
            return Prompt(given, tokenizer.decode(given, skip_special_tokens=False) if body.echo else None)

    def all_of_them(check: Check) -> list[Prompt]:
        return [one(number, given, check) for number, given in enumerate(body.prompt)]

    if body.echo or isinstance(body.prompt[0], str):
        return await _threads(sum(map(len, body.prompt))).run(all_of_them)
    return all_of_them(lambda: None)


def _threads(size: int) -> Workers:
    """Workers for texts of `size` characters."""
    return _long_texts if size > LONG_PROMPT else _tokenizers


@contextmanager
def refusals(param: str, context: int) -> Iterator[None]:
    """Within, what a tokenizer refuses becomes a `RequestError` naming `param`."""
    try:
        yield
    except TooLong as error:
        raise RequestError(
            f"This model's maximum context length is {context} tokens. However, the prompt has at least {error.least} "
            "tokens. Shorten it; the server's --context-length sets the maximum",
            param,
            CONTEXT_EXCEEDED,
        ) from error
    except TokenizerError as error:
        raise RequestError(str(error), param) from error


async def run(
    llm: AsyncLLM,
    jobs: list[Job],
    metrics: Metrics,
    running: dict[str, str],
    watch: Watch | None = None,
    client: str = "",
    trace: Trace | None = None,
    priority: int | None = None,
) -> Deltas:
    """Generate for all prompts at once; yields (number of the prompt, delta) as they come. `watch` and `trace` see them
    too. Meanwhile `running` has the jobs' ids, and those of their responses. `client`: whose they are.
    `priority`: of all jobs.

    **Raises:** `RequestError` before any prompt has started, if one can't be served, or its `rid` is in use.
    """
    if len(jobs) > 1:
        await llm.check([(job.prompt, job.params) for job in jobs])
    if chosen := {job.name for job in jobs if job.chosen}.intersection(running.values()):
        raise RequestError(f"another request with the rid {min(chosen)!r} is running; choose another", "rid")
    watches = [metrics.watch(job.params) for job in jobs]
    streams = [llm.generate(job.prompt, job.params, job.id, client, priority or 0, job.lora) for job in jobs]
    metrics.load += 1
    named = {job.id: job.name for job in jobs}
    running.update(named)
    try:
        async with aclosing(_merge(streams)) as merged:
            async for number, delta in merged:
                watches[number].see(delta)
                if watch is not None:
                    watch.see(number, delta)
                if trace is not None:
                    trace.see(delta)
                yield number, delta
    finally:
        if trace is not None:
            trace.end(sys.exception())
        metrics.load -= 1
        for each in named:
            del running[each]


async def _merge(streams: list[AsyncGenerator[Delta]]) -> Deltas:
    """Interleave streams. The first that fails ends them all; closing this closes them all."""
    if len(streams) == 1:  # the usual case needs no tasks
        async with aclosing(streams[0]) as stream:
            async for delta in stream:
                yield 0, delta
        return
    arrived: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[Delta]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    arrived.put_nowait((number, delta))
            arrived.put_nowait((number, None))
        except Exception as error:
            arrived.put_nowait((number, error))

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        open_streams = len(streams)
        while open_streams:
            number, item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class UnlessGone:
    """`with UnlessGone(receive):` cancels what is awaited within as soon as the client disconnects.

    **Raises:** `ClientGone`, once what was cancelled has cleaned up.
    """

    def __init__(self, receive: Receive):
        self._receive, self._gone = receive, False

    def __enter__(self) -> UnlessGone:
        self._task = asyncio.current_task()
        self._before = self._task.cancelling()
        self._watch = asyncio.ensure_future(self._disconnect())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._watch.cancel()
        if self._gone and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise ClientGone from error

    async def _disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()


async def collect(deltas: Deltas, reply: Answer) -> Any:
    """Run a request to its end and return the whole response."""
    async with aclosing(deltas):
        async for number, delta in deltas:
            reply.take(number, delta)
    return reply.whole()


class EventStream(Response):
    """A reply as server-sent events, starting with a delta already taken: its errors had their own status code.

    An error later on is sent as an event, as the reply words it.
    """

    media_type = "text/event-stream"

    def __init__(self, llm: AsyncLLM, reply: Answer, first: tuple[int, Delta], deltas: Deltas):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.llm, self.reply, self.first, self.deltas = llm, reply, first, deltas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.deltas):  # aborts the request if it isn't done
            with suppress(ClientGone), UnlessGone(receive):
                await self._send(send)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events()) as events:
            async for text in events:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[str]:
        if text := self.reply.chunks(*self.first):
            yield text
        try:
            async for number, delta in self.deltas:
                if text := self.reply.chunks(number, delta):
                    yield text
        except Exception as error:
            yield self.reply.failed(describe(error, self.llm.error))
            return
        yield self.reply.closing()
