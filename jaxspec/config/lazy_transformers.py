"""transformers, imported when it is used, and where nobody else needs PyTorch without that.

transformers imports PyTorch where it is installed, also for a tokenizer, which doesn't use it: 10 of the 14 s that one
took on a GPU's host. It looks for it once in a process; so a process decides for all that is in it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType

_spared = False


def spare_torch() -> None:
    """Let transformers find no PyTorch from now on. For processes that are all ours: the server, a benchmark."""
    global _spared
    _spared = True


@contextlib.contextmanager
def imported() -> Iterator[ModuleType]:
    """transformers. What is asked of it within imports no PyTorch, if that is spared and not there yet."""
    # It takes seconds, so it is imported on use; and it would announce that PyTorch is missing, which is as intended.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    hidden = _spared and "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # as if it weren't installed
    try:
        import transformers

        yield transformers
    finally:
        if hidden:
            del sys.modules["torch"]
