"""Progress bars on stderr. A terminal's moves; a file, such as a container's log, gets one every ten seconds."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(total: int, desc: str, unit: str, shown: bool = True, **options: Any) -> tqdm:
    """A bar that counts to `total`, or none if it isn't `shown`. `options` are tqdm's."""
    seconds = 0.1 if sys.stderr.isatty() else 10
    return tqdm(total=total, desc=desc, unit=unit, disable=not shown, mininterval=seconds, **options)
