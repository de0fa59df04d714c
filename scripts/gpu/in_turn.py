"""`python scripts/gpu/in_turn.py LOCK decode ...`: as `python -m jaxspec.bench decode ...`, on a GPU that is shared.

Its engine starts beside those of others, which takes most of the time, and waits for the lock on the file LOCK before
anything is timed. Give each engine its share of the memory by XLA_PYTHON_CLIENT_MEM_FRACTION, and let nothing else run
on that GPU.
"""

import fcntl
import sys
from typing import Any

from jaxspec.bench import adaptive, engines
from jaxspec.bench.__main__ import main


def run(lock: str, arguments: list[str]) -> int:
    start, time_rounds = engines.start, adaptive.time_rounds
    with open(lock, "a") as file:

        def started(*args: Any, **options: Any) -> Any:
            engine = start(*args, **options)
            fcntl.flock(file, fcntl.LOCK_EX)
            return engine

        def timed(*args: Any) -> Any:
            fcntl.flock(file, fcntl.LOCK_EX)
            return time_rounds(*args)

        engines.start, adaptive.time_rounds = started, timed  # `bench adaptive` makes its engine itself, then times it
        return main(arguments)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(run(sys.argv[1], sys.argv[2:]))
