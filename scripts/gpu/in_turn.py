"""`python scripts/gpu/in_turn.py LOCK decode ...`: as `python -m jaxspec.bench decode ...`, on a GPU that is shared; or
`LOCK compare ...`: as `python -m jaxspec.train compare ...`, whose trainings take turns, too.

Its engine starts and compiles beside those of others, which takes most of the time, and waits for the lock on the file
LOCK before anything is timed. Give each engine its share of the memory by XLA_PYTHON_CLIENT_MEM_FRACTION, and let
nothing else run on that GPU.
"""

import fcntl
import sys
from collections.abc import Callable
from typing import Any

from jaxspec.bench import adaptive, engines, steady, traffic
from jaxspec.bench.__main__ import main


def run(lock: str, arguments: list[str]) -> int:
    with open(lock, "a") as file:

        def locked(call: Callable) -> Callable:
            def wait_and_call(*args: Any, **options: Any) -> Any:
                fcntl.flock(file, fcntl.LOCK_EX)  # nothing, once it is held
                return call(*args, **options)

            return wait_and_call

        start = engines.start

        def started(*args: Any, **options: Any) -> Any:
            engine = start(*args, **options)
            fcntl.flock(file, fcntl.LOCK_EX)
            return engine

        steady.Load.run, adaptive.time_rounds = locked(steady.Load.run), locked(adaptive.time_rounds)
        traffic.serve = locked(traffic.serve)
        if arguments[0] == "compare":
            from jaxspec.train import __main__ as training
            from jaxspec.train import loop

            loop.train, engines.start = locked(loop.train), started
            return training.main(arguments)
        if arguments[0] != "decode":  # which goes on compiling, and then times loads alone
            engines.start = started
        return main(arguments)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(run(sys.argv[1], sys.argv[2:]))
