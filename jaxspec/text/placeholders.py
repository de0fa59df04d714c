"""Where pictures stand in a prompt: a chat template writes a placeholder for each, which becomes a picture's tokens.

A video has one placeholder, too, which becomes those of its pictures, each behind its time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from jaxspec.text.errors import TokenizerError

GENERIC = "<image>"  # SGLang's placeholder for a picture of any model


@dataclass(frozen=True)
class Placeholder:
    """A model's placeholder.

    **Attributes:**

    - `written`: what the chat template writes for a picture.
    - `becomes`: what stands in its place before text is tokenised: `token` once, and what the published processor
      writes around it.
    - `alone`: what the chat template writes for a picture with the tokens around it, for prompts without a template.
    - `token`, `token_id`: the token that is repeated for each row that a picture fills.
    """

    written: str
    becomes: str
    alone: str
    token: str
    token_id: int

    def check(self, text: str) -> None:
        """**Raises:** `TokenizerError` for a client's text that would stand for a picture."""
        for mark in (self.written, self.token):
            if mark in text:
                raise TokenizerError(f"the text has {mark!r}, which stands for a picture; leave it out")

    def settle(self, text: str, pictures: int) -> str:
        """A template's text with what `becomes` of each placeholder.

        **Raises:** `TokenizerError` unless it has one for each picture.
        """
        if (found := text.count(self.written)) != pictures:
            raise TokenizerError(
                f"the prompt has {found} placeholders {self.written!r} for {pictures} pictures; it must have one "
                "for each. A chat template may write those of some roles alone, such as user"
            )
        return text.replace(self.written, self.becomes)

    def stand(self, text: str, pictures: int) -> str:
        """A prompt without a template, with a placeholder for each picture: its own, those in place of each `<image>`,
        or, where it has none of either, at its beginning. **Raises:** as `settle`."""
        if pictures and self.written not in text:
            text = text.replace(GENERIC, self.alone) if GENERIC in text else self.alone * pictures + text
        return self.settle(text, pictures)

    def settle_videos(self, text: str, videos: Sequence[Sequence[float]]) -> str:
        """A template's text with the pictures of videos in place of each one's placeholder. `videos`: the times of
        each one's. **Raises:** `TokenizerError` unless it has one placeholder for each."""
        first, *others = text.split(self.written)
        if len(others) != len(videos):
            raise TokenizerError(
                f"the prompt has {len(others)} placeholders {self.written!r} for {len(videos)} videos; it must have "
                "one for each"
            )
        shown = ("".join(f"<{time:.1f} seconds>{self.becomes}" for time in times) for times in videos)
        return first + "".join(picture + rest for picture, rest in zip(shown, others, strict=True))


def expand(ids: Sequence[int], pictures: Sequence[tuple[Placeholder, int]]) -> tuple[list[int], list[int]]:
    """Token ids with each picture's token repeated as often as it fills rows, and where each picture begins.

    A token that is repeated so already, as in the prompt of an earlier reply, stays.

    **Raises:** `TokenizerError` unless `ids` have, in this order, one such token for each picture, or one for each of
    its rows.
    """
    tokens = {placeholder.token_id for placeholder, _ in pictures}
    places = [place for place, token in enumerate(ids) if token in tokens]
    ids, whole, starts, after, single = list(ids), [], [], 0, len(places) == len(pictures)
    for placeholder, count in pictures:
        at = bisect_left(places, after)
        if at == len(places) or ids[place := places[at]] != placeholder.token_id:
            after = len(ids) + 1
            break
        rows, whole = [placeholder.token_id] * count, whole + ids[after:place]
        starts.append(len(whole))
        whole += rows
        after = place + (count if not single and ids[place : place + count] == rows else 1)
    if after > len(ids) or (places and places[-1] >= after):
        named = " or ".join(sorted({repr(placeholder.token) for placeholder, _ in pictures}))
        raise TokenizerError(
            f"the prompt has {len(places)} tokens {named} for {len(pictures)} pictures; it must have one for each, "
            f"or one for each of their {sum(count for _, count in pictures)} rows"
        )
    return whole + ids[after:], starts
