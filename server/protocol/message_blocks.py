"""Content blocks of `/v1/messages`: checked one by one, and turned into the parts of a chat's messages.

Invariant: a block is used, or known not to matter, or refused by its type. Fields that a block may also have, such as
`cache_control`, pass unread.
"""

from __future__ import annotations

import base64
import json
import re
from itertools import chain, groupby
from typing import Annotated, Any

from pydantic import Field

from jaxspec.config.request import RequestError
from server.protocol.base import Open, Place, at, check_text, read_each, shown
from server.protocol.message_tools import CHANGES, read_change

MAX_BLOCKS = 1000  # of one message, and of one result
# Claude Code's first system block. Its hash changes with every request, so a prompt with it would never be cached.
BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n?")
# Begins a signature that has the text of thinking, for a client that leaves the text out and sends the block back.
CARRIES = "jaxspec:"
# Calls that Anthropic's servers made within an assistant's turn, and what came of them; here they are text.
CALLS = ("server_tool_use", "mcp_tool_use")
RESULTS = (
    *("web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result", "tool_search_tool_result"),
    *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "advisor_tool_result"),
    "mcp_tool_result",
)
NEEDLESS = ("redacted_thinking", "fallback", "mcp_tool_listing")  # say nothing that a model here could use
BY_ROLE = {
    "system": ("text",),
    "system message": ("text", *CHANGES),
    "user": ("text", "image", "document", "search_result", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "compaction", *CALLS, *RESULTS, *NEEDLESS),
    "tool_result": ("text", "image", "document", "search_result", "tool_reference"),
    "document": ("text", "image"),
    "search_result": ("text",),
}


class _Block(Open):
    type: str


Blocks = Annotated[list[_Block], Field(max_length=MAX_BLOCKS)]


def read_blocks(content: Any, role: str) -> list[dict[str, Any]]:
    """The checked blocks of a `role`'s content, which may be a string. **Raises:** `RequestError` at the block."""
    if isinstance(content, str):
        return [_text(check_text(content))]
    if not isinstance(content, list):
        raise RequestError(f"must be a string or a list of blocks, got {shown(content)}")
    if len(content) > MAX_BLOCKS:
        raise RequestError(f"has {len(content)} blocks, at most {MAX_BLOCKS} are allowed")
    return read_each(content, lambda block: read(block, role))


def read(block: Any, role: str) -> dict[str, Any]:
    """A block of a `role`'s content, checked: an image as the chat's part, a call with its arguments as a string, a
    document as its parts. **Raises:** `RequestError`."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in BY_ROLE[role]:
        given = f"the type {shown(kind)}" if isinstance(kind, str) else shown(block)
        raise RequestError(f"{role} content takes blocks of type {', '.join(BY_ROLE[role])}, got {given}")
    if kind == "text":
        return _text(_string(block, "text"))
    if kind == "image":
        return _image(block.get("source"))
    if kind == "document":
        return _document(block)
    if kind == "search_result":
        says = [_string(block, "title"), _string(block, "source")]
        with at("content"):
            texts = read_blocks(block.get("content"), kind)
        return _text("\n".join([*says, *(each["text"] for each in texts)]))
    if kind == "tool_reference":
        return _text(f"The tool {_string(block, 'tool_name')} can be called now.")
    if kind == "tool_result":
        with at("content"):
            results = read_blocks("" if block.get("content") is None else block["content"], kind)
        error = block.get("is_error") or False
        if not isinstance(error, bool):
            raise RequestError(f"a tool_result needs true or false as its is_error, got {shown(error)}")
        return {"type": kind, "tool_use_id": _string(block, "tool_use_id"), "content": results, "is_error": error}
    if kind == "tool_use":
        given = block.get("input")
        if not isinstance(given, dict):
            raise RequestError(f"a tool_use needs an object as its input, got {shown(given)}")
        function = {"name": _string(block, "name"), "arguments": json.dumps(given, ensure_ascii=False)}
        return {"type": kind, "call": {"id": _string(block, "id"), "type": "function", "function": function}}
    if kind in CHANGES:
        return {"type": kind, **read_change(kind, block.get("tool"))}
    if kind == "thinking":
        return {"type": kind, "thinking": _string(block, "thinking") or _carried(block.get("signature"))}
    if kind == "compaction":  # the summary of what was said before, unless making it failed
        return _text("" if block.get("content") is None else _string(block, "content"))
    if kind in CALLS:
        return _text(f"{_string(block, 'name')} {_readable(block.get('input'))}")
    if kind in RESULTS:
        return _text(_readable(block.get("content")))
    return {"type": kind}


def system_text(blocks: list[dict[str, Any]]) -> str:
    """The text of system blocks, without the billing header."""
    return "\n".join(filter(None, (BILLING.sub("", block["text"]) for block in blocks if block["type"] == "text")))


def with_places(blocks: list[dict[str, Any]], place: Place) -> list[dict[str, Any]]:
    """Checked blocks of the list at a place, each with where it stands as its `at`; so have those of results."""
    return [
        block
        | {"at": (*place, number)}
        | (
            {"content": with_places(block["content"], (*place, number, "content"))}
            if block["type"] == "tool_result"
            else {}
        )
        for number, block in enumerate(blocks)
    ]


def parts(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checked blocks as parts of a chat's message, each with its block's `at`, without empty texts."""
    inner = lambda block: block["parts"] if block["type"] == "document" else [block]  # noqa: E731
    found = chain.from_iterable([part | {"at": block["at"]} for part in inner(block)] for block in blocks)
    return [part for part in found if part["type"] != "text" or part["text"]]


def carrying(thought: str) -> str:
    """A signature that has the text of thinking in it."""
    return CARRIES + base64.b64encode(thought.encode()).decode()


def _carried(signature: Any) -> str:
    """The text in a signature; none in others. **Raises:** `RequestError`."""
    if not isinstance(signature, str) or not signature.startswith(CARRIES):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(CARRIES), validate=True).decode()
    except ValueError:
        raise RequestError("a thinking block has another signature than it came with; send it back as it was") from None


def _readable(value: Any) -> str:
    """A call's input or result as JSON, without what only Anthropic's servers read. Marks for their cache move from
    request to request, and so would the prompt."""

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: kept(each)
                for key, each in value.items()
                if key != "cache_control" and not key.startswith("encrypted_")
            }
        return [kept(each) for each in value] if isinstance(value, list) else value

    return check_text(json.dumps(kept(value), ensure_ascii=False))


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _string(block: dict[str, Any], name: str) -> str:
    if not isinstance(block.get(name), str):
        raise RequestError(f"a {block['type']} block needs a string as its {name}, got {shown(block.get(name))}")
    return check_text(block[name])


def _image(source: Any) -> dict[str, Any]:
    """An image as the part that a chat takes, which refuses it unless the model serves pictures."""
    kind = source.get("type") if isinstance(source, dict) else None
    if kind not in ("base64", "url"):
        raise RequestError(f"an image needs a source of type base64 or url, got {shown(source)}")
    url = _string(source, "url") if kind == "url" else f"data:{_string(source, 'media_type')};base64,"
    return {"type": "image_url", "image_url": {"url": url if kind == "url" else url + _string(source, "data")}}


def _document(block: dict[str, Any]) -> dict[str, Any]:
    """A document's parts, texts and images, behind its title and context."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "text":
        body = [_text(_string(source, "data"))]
    elif kind == "content":
        with at("source.content"):
            body = read_blocks(source.get("content"), "document")
    else:
        raise RequestError(
            f"a document needs a source of type text or content, got {shown(kind)}; send a PDF's pages as those"
        )
    head = [_text(_string(block, name)) for name in ("title", "context") if block.get(name) is not None]
    found: list[dict[str, Any]] = []
    for kind, run in groupby(head + body, lambda part: part["type"]):
        same = list(run)
        found += [_text("\n".join(part["text"] for part in same))] if kind == "text" else same
    return {"type": "document", "parts": found}
