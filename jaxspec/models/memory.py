"""Descriptions of what a layer keeps of the tokens so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PagedRows:
    """Memory of all tokens, in pages: of each token `streams` of `heads` rows, `width` wide.

    Keys and values are two streams. A latent, of which both are made, is one. `pool`: layers of another one have pages
    of their own, even where a device's part of theirs has equally many heads. `by_request`: how many devices have the
    pages of as many parts of the requests; 1: each has all pages.
    """

    heads: int
    width: int
    streams: int = 2
    pool: int = 0
    by_request: int = 1

    @property
    def numbers(self) -> int:
        """Numbers of a token."""
        return self.streams * self.heads * self.width


@dataclass(frozen=True)
class Recurrence:
    """Memory of fixed size: a state S [value_dim, key_dim] of each of `value_heads`, S = decay S + u k'.

    Each of `key_heads` serves as many value heads. Before it may stand a convolution over `channels`, `taps` wide,
    whose newest inputs are kept too. `channel_decay`: a decay is a number of each key channel, not of the head. Without
    value heads the newest inputs are all that is kept; `dtype`: theirs; None: that of the activations.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    channels: int = 0
    taps: int = 1
    channel_decay: bool = False
    dtype: str | None = None

    @classmethod
    def newest(cls, count: int, channels: int, dtype: str | None = None) -> Recurrence:
        """The newest `count` inputs of so many channels, and no state."""
        return cls(0, 0, 0, 0, channels, count + 1, dtype=dtype)


Memory = PagedRows | Recurrence
