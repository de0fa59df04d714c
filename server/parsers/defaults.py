"""Which formats a model speaks, where no flag says: read from its chat template, which shows the model's own markers.

One table a kind, the first line that fits counts. Fine-tunes keep their base's model type but not always its format, so
the model type only decides where the template can't.
"""

from __future__ import annotations

import re

# (marker that the template has, model types or None for any, format)
REASONING_DEFAULTS: tuple[tuple[str, str | None, str], ...] = (
    ("<|channel|>", None, "harmony"),
    ("[THINK]", None, "mistral"),
    ("<think>", "qwen3", "qwen3"),
    ("</think>", "qwen3", "qwen3"),
    ("<｜Assistant｜>", None, "deepseek_r1"),
    ("<think>", None, "think"),
)
TOOL_DEFAULTS: tuple[tuple[str, str | None, str], ...] = (
    ("<|channel|>", None, "harmony"),
    ("<function=", None, "qwen3_coder"),
    ("<tool_call>", None, "hermes"),
    ("[TOOL_CALLS]", None, "mistral"),
    ("<|python_tag|>", None, "llama3_json"),
    ('"parameters": dictionary of argument name', None, "llama3_json"),
)


def reasoning_default(model_type: str, template: str | None) -> str | None:
    """The reasoning format of a model with this chat template, or None where it has none that is known."""
    return _first(REASONING_DEFAULTS, model_type, template)


def tool_default(model_type: str, template: str | None) -> str | None:
    """The tool format of a model. A template that mentions no tools is a model's that was taught no format: with
    Hermes', the commonest, tools are described in a system message."""
    if template is not None and not mentions_tools(template):
        return "hermes"
    return _first(TOOL_DEFAULTS, model_type, template)


def mentions_tools(template: str) -> bool:
    """Whether a chat template looks at its variable `tools`."""
    return any(re.search(r"\btools\b", block) for block in re.findall(r"\{[{%].*?[}%]\}", template, re.DOTALL))


def _first(table: tuple[tuple[str, str | None, str], ...], model_type: str, template: str | None) -> str | None:
    fits = (name for marker, kind, name in table if marker in (template or "") and model_type.startswith(kind or ""))
    return next(fits, None)
