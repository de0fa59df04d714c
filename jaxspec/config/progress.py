"""Progress bars of a start on stderr, and with `--log-level debug` the time that each of its parts took.

A terminal alone has bars: in a file, such as a container's log, lines of the log say what was loaded.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

log = logging.getLogger("jaxspec")

LINE_SECONDS = 5.0


def progress_bar(total: int, desc: str, unit: str, shown: bool = True, **options: Any) -> tqdm:
    """A bar that counts to `total`, or none if it isn't `shown` or stderr is no terminal. `options` are tqdm's."""
    return tqdm(total=total, desc=desc, unit=unit, disable=not (shown and sys.stderr.isatty()), **options)


@contextlib.contextmanager
def bytes_bar(total: int, desc: str, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Count bytes to `total`: call what this gives with each that come. A bar has GB/s and the time left; where there
    is none, a line of the log every `LINE_SECONDS` has them. A line at the end has GB/s of the whole."""
    began = lined = time.monotonic()
    have = 0
    with progress_bar(total, desc, "B", shown, unit_scale=True) as bar:

        def add(count: int) -> None:
            nonlocal have, lined
            bar.update(count)
            have, now = have + count, time.monotonic()
            if bar.disable and have < total and now - lined >= LINE_SECONDS:
                lined, each = now, have / (now - began)
                log.info("%s: %.1f of %.1f GB, %.2f GB/s, %d s left", *(desc, have / 1e9, total / 1e9, each / 1e9),
                         (total - have) / each)  # fmt: skip

        yield add
    seconds = time.monotonic() - began
    log.info("%s: %.2f GB in %.1f s, %.2f GB/s", desc, total / 1e9, seconds, total / 1e9 / max(seconds, 1e-9))


@contextlib.contextmanager
def took(what: str) -> Iterator[None]:
    """Log what was done, and in how many seconds, once it is over."""
    began = time.monotonic()
    yield
    log.debug("%s in %.2f s", what, time.monotonic() - began)
