"""A chat as text: the checkpoint's own Jinja template, which transformers renders in a sandbox."""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any

from jinja2 import TemplateSyntaxError

from jaxspec.config.lazy_transformers import imported
from jaxspec.text.chat_forms import in_form
from jaxspec.text.errors import TokenizerError


def write_chat(
    fast: Any,
    /,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **kwargs: Any,
) -> str:
    """A chat's text, special tokens included, as the model's own template writes it, all of its messages.

    **Arguments:**

    - `fast`: a transformers fast tokenizer.
    - `tools`: functions as JSON objects; None chooses the template for chats without tools.
    - `add_generation_prompt`: end with what opens the assistant's answer. `continue_final_message`: end in the midst of
      the last message, which the model is to go on with.
    - `kwargs`: the template's own variables.

    **Raises:** `TokenizerError` with the template's own complaint when it refuses, for a message that it doesn't write
    in any form (`chat_forms`), or when there is no template.
    """
    if (template := fast.chat_template) is None:
        raise TokenizerError("this model's tokenizer has no chat template; use the completions endpoint instead")
    if isinstance(template, dict) and not {"default", "default" if tools is None else "tool_use"} & template.keys():
        raise TokenizerError(
            f"this model's tokenizer has chat templates named {', '.join(template) or 'nothing'}, and no default"
        )
    options = {
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "tokenize": False,
    }
    if clash := sorted(reserved_template_variables() & kwargs.keys()):
        raise TokenizerError(f"{', '.join(clash)} can't be set as a variable of the chat template")
    if isinstance(template, dict):
        template = template["tool_use" if tools is not None and "tool_use" in template else "default"]

    def render(messages: list[dict[str, Any]]) -> str:
        try:
            return fast.apply_chat_template(messages, **options, **kwargs)
        except TemplateSyntaxError as error:
            raise TokenizerError(f"the chat template has a mistake in line {error.lineno}: {error.message}") from error
        except Exception as error:  # a template is a program from the checkpoint: it may raise anything
            raise TokenizerError(f"the chat template refused the messages: {error}") from error

    if all(isinstance(message, dict) for message in messages):
        messages = in_form(messages, template, options | kwargs, render)
    return render(messages)


@cache
def reserved_template_variables() -> frozenset[str]:
    """Names that no variable of a chat template may have: the arguments of transformers' methods, which would change
    how the prompt is made instead of what the template sees."""
    with imported() as transformers:
        methods = (
            transformers.PreTrainedTokenizerBase.apply_chat_template,
            transformers.utils.chat_template_utils.render_jinja_template,
            write_chat,
        )
    named = (p for method in methods for p in inspect.signature(method).parameters.values())
    return frozenset(p.name for p in named if p.kind not in (p.VAR_KEYWORD, p.POSITIONAL_ONLY))


def code_of(template: str) -> str:
    """A template's statements and expressions, without the text around them."""
    return " ".join(re.findall(r"\{[{%].*?[}%]\}", template, re.DOTALL))
