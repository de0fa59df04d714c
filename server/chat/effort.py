"""Reasoning effort, in the words that the served model's chat template takes.

A template that compares `reasoning_effort` with names takes those. One that reads it and names no two takes low, medium
and high, as gpt-oss' does. One that has a switch only is switched: off for `none`, on for the others.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta

from jaxspec.text.chat_template import code_of

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
USUAL = ("low", "medium", "high")
SWITCHES = ("enable_thinking", "thinking")  # of templates: Qwen3's and others', DeepSeek's


def effort_variables(effort: str, template: str | None) -> dict[str, Any]:
    """Variables that ask a template for an effort, or for the nearest that it takes; of two, the higher."""
    efforts, switch = _taken(template or "")
    if effort == "none" and "none" not in efforts and switch:
        return {switch: False}
    nearest = min(efforts, key=lambda each: (abs(_rank(each) - _rank(effort)), -_rank(each)), default=effort)
    return {"reasoning_effort": nearest} | ({switch: nearest != "none"} if switch else {})


def _rank(effort: str) -> int:
    return EFFORTS.index(effort)


@lru_cache(maxsize=16)
def _taken(template: str) -> tuple[tuple[str, ...], str | None]:
    """Efforts that a template takes, none if it doesn't read them, and its switch."""
    read = _variables(template)
    switch = next((name for name in SWITCHES if name in read), None)
    if "reasoning_effort" not in read:
        return (), switch
    code = code_of(template)
    named = tuple(effort for effort in EFFORTS if re.search(rf"['\"]{effort}['\"]", code))
    return named if len(named) > 1 else USUAL, switch


def _variables(template: str) -> set[str]:
    """Names that a template reads and doesn't set before."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])
    try:
        return meta.find_undeclared_variables(environment.parse(template))
    except TemplateSyntaxError:  # tags of transformers' own
        return set(re.findall(r"\b\w+\b", code_of(template)))
