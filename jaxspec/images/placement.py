"""Pictures in a prompt: the positions of its rows, and the keys by which the prefix cache knows them. No jax."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxspec.images.picture import PlacedPicture

MIXED = 0x9E3779B97F4A7C15  # an odd number: multiplied by it, neighbours are far apart


@dataclass(frozen=True, eq=False)
class Placement:
    """Pictures of one prompt, in order.

    - `shift`: what the position of a token behind all pictures is more than its place.
    - `keys`: by place of each row that a picture fills, the picture's key and the number of the row, hashed.
    - `axes`: int32[3, places], positions of all places up to the last picture's end: in the text, by row, by column.
    """

    pictures: tuple[PlacedPicture, ...]
    shift: int
    keys: dict[int, int]
    axes: np.ndarray

    @classmethod
    def of(cls, pictures: tuple[PlacedPicture, ...], merge: int | None) -> Placement:
        """Place pictures in a prompt.

        `merge`: patches on each side of a token, for models with positions on three axes; None: a place is a position.
        As published for Qwen3-VL, a picture takes as many positions as the longer of its sides has tokens.
        """
        parts, place, position = [np.zeros((3, 0), np.int64)], 0, 0
        for picture, start in ((each.picture, each.start) for each in pictures):
            text = np.broadcast_to(np.arange(start - place) + position, (3, start - place))
            position += start - place
            if merge is None:
                own, taken = np.broadcast_to(np.arange(picture.tokens), (3, picture.tokens)), picture.tokens
            else:
                _, rows, columns = (max(side // merge, 1) for side in picture.grid)
                own = np.stack([0 * np.arange(rows * columns), *np.divmod(np.arange(rows * columns), columns)])
                taken = max(rows, columns)
            parts += [text, own + position]
            place, position = start + picture.tokens, position + taken
        axes = np.concatenate(parts, axis=1).astype(np.int32)
        return cls(pictures, position - place, row_keys(pictures), axes)

    def positions(self, places: np.ndarray) -> np.ndarray:
        """Positions at these places on three axes, int[3, len(places)]."""
        within = np.minimum(places, self.axes.shape[1] - 1)
        return np.where(places < self.axes.shape[1], self.axes[:, within], places + self.shift)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Each picture's first place, and the one behind it."""
        return tuple((each.start, each.start + each.picture.tokens) for each in self.pictures)

    def last_seen(self, places: np.ndarray) -> np.ndarray:
        """The last place that the row at each of these sees, where a picture's rows see all of it."""
        seen = places.copy()
        for start, end in self.spans:
            seen[(places >= start) & (places < end)] = end - 1
        return seen

    def overlapping(self, start: int, stop: int) -> list[PlacedPicture]:
        """Pictures with a row from place `start` on and before `stop`."""
        return [each for each in self.pictures if each.start < stop and each.start + each.picture.tokens > start]


def row_keys(pictures: tuple[PlacedPicture, ...]) -> dict[int, int]:
    """Keys of the rows that pictures fill, as `Placement.keys` has them."""
    return {each.start + row: _key(each.picture.key, row) for each in pictures for row in range(each.picture.tokens)}


def _key(picture: int, row: int) -> int:
    """Hash a picture's key with a row's number into 64 bits, the highest of which is set, as of no token's id."""
    mixed = (picture ^ (row + 1) * MIXED) * MIXED % 2**64
    return (mixed ^ mixed >> 29) * MIXED % 2**64 | 1 << 63
