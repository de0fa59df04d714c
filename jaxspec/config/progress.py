"""Progress bars of a start on stderr, and with `--log-level debug` the time that each of its parts took.

A terminal alone has bars: in a file, such as a container's log, lines of the log say what was loaded.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

log = logging.getLogger("jaxspec")


def progress_bar(total: int, desc: str, unit: str, shown: bool = True, **options: Any) -> tqdm:
    """A bar that counts to `total`, or none if it isn't `shown` or stderr is no terminal. `options` are tqdm's."""
    return tqdm(total=total, desc=desc, unit=unit, disable=not (shown and sys.stderr.isatty()), **options)


@contextlib.contextmanager
def took(what: str) -> Iterator[None]:
    """Log what was done, and in how many seconds, once it is over."""
    began = time.monotonic()
    yield
    log.debug("%s in %.2f s", what, time.monotonic() - began)
