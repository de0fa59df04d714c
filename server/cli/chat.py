"""`jaxspec chat`: a conversation in a terminal, with a server by its URL or with a model that is loaded here.

Replies stream. Each ends with its tokens, its tokens a second, and the tokens a round that drafts gave it. An empty
line does nothing, /clear forgets the conversation, and /exit or Ctrl-D ends it. Ctrl-C ends a reply, or the command.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from jaxspec import AsyncLLM, CheckpointError, ConfigError, EngineDead, RequestError, SamplingParams
from jaxspec.cli import called
from jaxspec.config.engine_config import SERVER_DEFAULTS
from jaxspec.config.flags import CommandParser, add_engine_flags, add_value, engine_options, parse, positive
from jaxspec.config.lazy_transformers import spare_torch
from jaxspec.text.errors import TokenizerError
from server.replies.speculation import Speculation

Message = dict[str, str]


@dataclass
class Figures:
    """Figures of a reply; `accept_length` None: it had no drafts, or the server doesn't say."""

    tokens: int = 0
    accept_length: float | None = None
    began: float = field(default_factory=time.monotonic)

    def line(self) -> str:
        seconds = time.monotonic() - self.began
        drafts = "" if self.accept_length is None else f", accept len {self.accept_length:.2f}"
        return f"[{self.tokens} tokens, {self.tokens / seconds:.1f} tok/s{drafts}]"


class ChatError(Exception):
    """A reply that failed, in words for a person."""


def make_parser() -> argparse.ArgumentParser:
    """The parser: the engine's flags, and those of the conversation."""
    parser = CommandParser(
        "jaxspec chat",
        usage="%(prog)s [MODEL | URL] [flags below]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("target", nargs="?", metavar="MODEL | URL", help="as --model, or a server's http://host:port")
    group = parser.add_argument_group("conversation")
    add_value(group, "--system", str, None, "TEXT", "system message")
    add_value(group, "--temperature", float, None, "T", "0 is greedy (the model's, or the server's)")
    add_value(group, "--max-tokens", positive, 1024, "N", "most tokens of a reply")
    add_value(group, "--api-key", str, None, "KEY", "of the server ($JAXSPEC_API_KEY)")
    add_engine_flags(parser, SERVER_DEFAULTS | {"max_running_requests": 1})
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Converse until the input ends; returns the exit status."""
    args = parse(make_parser(), sys.argv[1:] if argv is None else argv)
    try:
        if args.target and args.target.startswith(("http://", "https://")):
            return converse(args, lambda messages, figures: remote(args, messages, figures))
        args.model = args.target or args.model
        spare_torch()
        with asyncio.Runner() as runner, closing(AsyncLLM(**engine_options(args))) as llm:
            return converse(args, lambda messages, figures: _pulled(runner, local(llm, args, messages, figures)))
    except (CheckpointError, ConfigError, TokenizerError) as error:
        print(f"{called('chat', 'server.cli.chat')}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130


def converse(args: argparse.Namespace, reply: Callable[[list[Message], Figures], Iterator[str]]) -> int:
    """Read lines and print replies. `reply` yields the text of one, and fills in its figures."""
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = [*opening]
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if line == "/exit":
            return 0
        if line == "/clear":
            messages = [*opening]
        elif line:
            messages.append({"role": "user", "content": line})
            said, figures = [], Figures()
            try:
                for text in reply(messages, figures):
                    said.append(text)
                    print(text, end="", flush=True)
            except KeyboardInterrupt:
                pass  # the reply ends here, and the conversation goes on
            except (ChatError, RequestError, EngineDead) as error:
                print(f"{called('chat', 'server.cli.chat')}: {error}", file=sys.stderr)
                messages.pop()
                if not sys.stdin.isatty():
                    return 1
                continue
            print(f"\n{figures.line()}", flush=True)
            messages.append({"role": "assistant", "content": "".join(said)})


async def local(
    llm: AsyncLLM, args: argparse.Namespace, messages: list[Message], figures: Figures
) -> AsyncIterator[str]:
    """The reply of an engine of this process."""
    if llm.tokenizer is None:
        raise ChatError("this model has no tokenizer and can't chat")
    prompt = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    given = {} if args.temperature is None else {"temperature": args.temperature}
    params = SamplingParams(**{**llm.sampling, **given, "max_tokens": min(args.max_tokens, _room(llm, prompt))})
    drafts = Speculation()
    async with aclosing(llm.generate(prompt, params)) as deltas:
        async for delta in deltas:
            figures.tokens += len(delta.token_ids)
            if delta.metrics is not None:
                drafts.add(delta.metrics)
                _note(drafts.fields(), figures)
            yield delta.text


def _room(llm: AsyncLLM, prompt: list[int]) -> int:
    return max(1, llm.config.context_length - len(prompt))


def _pulled(runner: asyncio.Runner, stream: AsyncIterator[str]) -> Iterator[str]:
    """An asynchronous stream, one text at a time; it is closed with this iterator."""
    try:
        while (text := runner.run(anext(stream, None))) is not None:
            yield text
    finally:
        runner.run(stream.aclose())


def remote(args: argparse.Namespace, messages: list[Message], figures: Figures) -> Iterator[str]:
    """The reply of a server. **Raises:** `ChatError`."""
    given = {} if args.temperature is None else {"temperature": args.temperature}
    body = {"messages": messages, "stream": True, "max_tokens": args.max_tokens, **given}
    body |= {"stream_options": {"include_usage": True}}
    base, headers = server(args)
    with errors_of(base):
        body["model"] = _model(base, headers)
        for event in events(Request(f"{base}/v1/chat/completions", json.dumps(body).encode(), headers)):
            yield from _read(event, figures)


def server(args: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """The server's address, and the headers of a request to it."""
    key = args.api_key or os.environ.get("JAXSPEC_API_KEY")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    return args.target.rstrip("/").removesuffix("/v1"), headers


def events(request: Request) -> Iterator[dict[str, Any]]:
    """The objects that a server streams."""
    with urlopen(request) as response:
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                yield json.loads(data)


@contextmanager
def errors_of(base: str) -> Iterator[None]:
    """Within, what fails of a server is a `ChatError`."""
    try:
        yield
    except HTTPError as error:
        raise ChatError(f"{base} answered {error.code}: {_message(error.read())}") from error
    except URLError as error:
        raise ChatError(f"{base} can't be reached ({error.reason}); start the server, or give its address") from error
    except (OSError, HTTPException, ValueError) as error:
        raise ChatError(f"{base}: {error}") from error


def _model(base: str, headers: dict[str, str]) -> str:
    """The first model that the server lists."""
    with urlopen(Request(f"{base}/v1/models", headers=headers)) as response:
        return json.loads(response.read())["data"][0]["id"]


def _read(chunk: dict, figures: Figures) -> Iterator[str]:
    """Texts of a chunk, whose figures are noted. Reasoning is shown as it comes."""
    if "error" in chunk:
        raise ChatError(chunk["error"]["message"])
    for choice in chunk["choices"]:
        delta = choice["delta"]
        yield from filter(None, (delta.get("reasoning_content"), delta.get("content")))
    if chunk.get("usage"):
        figures.tokens = chunk["usage"]["completion_tokens"]
    _note(chunk, figures)


def _note(response: dict, figures: Figures) -> None:
    """Note the figures of drafts that a response, or a chunk of one, has."""
    drafts = (response.get("metrics") or {}).get("speculative_decoding") or {}
    figures.accept_length = drafts.get("mean_acceptance_length", figures.accept_length)


def _message(body: bytes) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
