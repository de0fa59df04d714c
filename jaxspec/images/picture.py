"""A picture as a request carries it."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Picture:
    """A preprocessed picture.

    **Attributes:**

    - `pixels`: float32 `[patches, patch values]`, in the order in which the family's published processor writes them.
    - `grid`: `(frames, rows, columns)` of patches; their product is the number of patches.
    - `tokens`: rows of the prompt that the picture fills.
    - `key`: an unsigned 64-bit hash of `pixels` and `grid`: two pictures with one key have one embedding.
    - `video`: whether it is of a video.
    """

    pixels: np.ndarray
    grid: tuple[int, int, int]
    tokens: int
    key: int
    video: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Video:
    """A preprocessed video.

    **Attributes:**

    - `pictures`: of some successive frames each.
    - `times`: in seconds from the video's beginning, of each picture.
    """

    pictures: tuple[Picture, ...]
    times: tuple[float, ...]

    @property
    def tokens(self) -> int:
        """Rows of the prompt that the video fills, its times apart."""
        return sum(picture.tokens for picture in self.pictures)


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt with pictures, as the engine takes it in place of text or token ids.

    **Attributes:**

    - `tokens`: all its token ids. A picture's placeholder is repeated, once for each of its `tokens`.
    - `images`: its pictures, in order.
    """

    tokens: list[int]
    images: tuple[PlacedPicture, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedPicture:
    """A picture of a prompt, and the row of the prompt at which its first token stands."""

    picture: Picture
    start: int
