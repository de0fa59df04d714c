"""`jaxspec send-one`: one prompt to a server, its text, and its figures as SGLang's `send_one` has them.

Latency is the whole request's, as the client sees it; speed is tokens over latency; accept length is tokens a round.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request

from jaxspec.cli import called
from jaxspec.config.flags import CommandParser, add_value, parse, positive
from server.cli.chat import ChatError, errors_of, events, server

URL = "http://127.0.0.1:30000"
PROMPT = "Human: Give me a fully functional FastAPI server. Show the full, long python code without stop.\n\nAssistant:"
IN_JSON = "Human: What is the capital of France? Give me three facts about it. Write them as JSON.\n\nAssistant:"
OF_IMAGE = "Human: Describe this image in a very short sentence.\n\nAssistant:"


def make_parser() -> argparse.ArgumentParser:
    """The parser."""
    parser = CommandParser("jaxspec send-one", description=__doc__, allow_abbrev=False)
    parser.add_argument("target", nargs="?", default=URL, metavar="URL", help=f"of a server ({URL})")
    add_value(parser, "--prompt", str, None, "TEXT", "a text to continue (one for a program, JSON or the picture)")
    add_value(parser, "--image", str, None, "SOURCE", "a picture's path or URL; the server decides on URLs")
    add_value(parser, "--max-tokens", positive, 512, "N", "most tokens of the reply")
    add_value(parser, "--temperature", float, 0.0, "T", "0 is greedy")
    add_value(parser, "--api-key", str, None, "KEY", "of the server ($JAXSPEC_API_KEY)")
    parser.add_argument("--json", action="store_true", help="constrain the reply to JSON")
    parser.add_argument("--stream", action="store_true", help="show the text as it comes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Send a prompt; returns the exit status."""
    args = parse(make_parser(), sys.argv[1:] if argv is None else argv)
    sampling = {"temperature": args.temperature, "max_new_tokens": args.max_tokens}
    sampling |= {"json_schema": "$$ANY$$"} if args.json else {}
    prompt = args.prompt if args.prompt is not None else IN_JSON if args.json else OF_IMAGE if args.image else PROMPT
    body = {"text": prompt, "sampling_params": sampling, "stream": True}
    base, headers = server(args)
    began, said, meta = time.monotonic(), "", {}
    try:
        body |= {"image_data": _image(args.image)} if args.image else {}
        with errors_of(base):
            for event in events(Request(f"{base}/generate", json.dumps(body).encode(), headers)):
                if "error" in event:
                    raise ChatError(event["error"]["message"])
                text, meta = event["text"], event["meta_info"]
                if args.stream:
                    print(text[len(said) :], end="", flush=True)
                said = text
    except ChatError as error:
        print(f"{called('send-one', 'server.cli.send_one')}: {error}", file=sys.stderr)
        return 1
    print("" if args.stream else said)
    print(figures(meta, time.monotonic() - began))
    return 0


def _image(source: str) -> str:
    """A picture as `/generate` takes it. **Raises:** `ChatError` for a file that can't be read."""
    if source.startswith(("http://", "https://", "data:")):
        return source
    try:
        return base64.b64encode(Path(source).expanduser().read_bytes()).decode()
    except OSError as error:
        raise ChatError(f"--image {source}: {error.strerror}; give a picture's path or URL") from error


def figures(meta: dict[str, Any], seconds: float) -> str:
    """The figures of a reply by its `meta_info`, as a table of two lines. Without drafts a round is a token."""
    tokens = meta["completion_tokens"]
    cells = {
        "latency (s)": f"{seconds:.3f}",
        "tokens": f"{tokens}",
        "accept length": f"{meta.get('spec_accept_length', 1.0):.3f}",
        "speed (token/s)": f"{tokens / seconds:.2f}",
    }
    width = max(map(len, cells))
    return "\n".join("  ".join(cell.rjust(width) for cell in row) for row in (cells, cells.values()))


if __name__ == "__main__":
    sys.exit(main())
