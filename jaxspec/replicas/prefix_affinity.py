"""Which of several engines has most of a prompt in its prefix cache: an estimate, from the prompts that each was given.

An engine's own tree isn't asked. It would have to be told of every page taken and dropped, and a wrong guess costs a
prefill, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxspec.images.picture import Prompt
from jaxspec.images.placement import row_keys


def pages(tokens: Sequence[int], page_size: int) -> list[int]:
    """A number for each whole page of a prompt, which stands for this page and all before it.

    None of a prompt with something else than token ids in it, which an engine will refuse.
    """
    try:
        data = np.asarray(tokens, np.int32).tobytes()
    except (TypeError, ValueError, OverflowError):
        return []
    step, chain = 4 * page_size, []
    for end in range(step, len(data) + 1, step):
        chain.append(hash((chain[-1] if chain else 0, data[end - step : end])))
    return chain


def told_apart(prompt: str | list[int] | Prompt) -> list[int]:
    """A prompt's token ids, with numbers of their own for each picture's rows; none of a text."""
    if not isinstance(prompt, Prompt):
        return prompt if isinstance(prompt, list) else []
    keys = row_keys(prompt.images)
    return [keys[place] % 2**31 if place in keys else token for place, token in enumerate(prompt.tokens)]


class Prefixes:
    """The pages that one engine was given, the latest `most` of them."""

    def __init__(self, most: int):
        self._most = most
        self._pages: dict[int, None] = {}  # the oldest first

    def matched(self, chain: list[int]) -> int:
        """How many pages of this prompt, from its first on, the engine was given."""
        return next((i for i, page in enumerate(chain) if page not in self._pages), len(chain))

    def note(self, chain: list[int]) -> None:
        """The engine has these. A prompt's first page is kept longest, since without it the others are of no use."""
        for page in reversed(chain):
            self._pages.pop(page, None)
            self._pages[page] = None
        while len(self._pages) > self._most:
            del self._pages[next(iter(self._pages))]

    def clear(self) -> None:
        self._pages.clear()
