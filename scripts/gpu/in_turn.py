"""`python scripts/gpu/in_turn.py LOCK decode ... [-- load ...]`: as `python -m jaxspec.bench`, on shared GPUs; or
`LOCK compare ...`: as `python -m jaxspec.train compare ...`, whose trainings take turns, too.

Its engine starts and compiles beside those of others, which takes most of the time, and waits for the lock on the file
LOCK before anything is timed; and on LOCK.starting until none of the others is starting. Give each engine its share of
the memory by XLA_PYTHON_CLIENT_MEM_FRACTION, and let nothing else run on those GPUs. Behind `--` is another benchmark
of the same target, whose weights are loaded once.
"""

import fcntl
import gc
import sys
from collections.abc import Callable
from itertools import groupby
from typing import Any

from jaxspec.bench import adaptive, engines, steady, traffic
from jaxspec.bench.__main__ import main


def run(lock: str, commands: list[list[str]]) -> int:
    with open(lock, "a") as file, open(f"{lock}.starting", "a") as starting:

        def wait() -> None:
            fcntl.flock(starting, fcntl.LOCK_UN)
            fcntl.flock(file, fcntl.LOCK_EX)  # nothing, once it is held
            fcntl.flock(starting, fcntl.LOCK_EX)  # others' starts have ended, and no new one begins

        def locked(call: Callable) -> Callable:
            def wait_and_call(*args: Any, **options: Any) -> Any:
                wait()
                return call(*args, **options)

            return wait_and_call

        start, load_target, targets = engines.start, engines.load_target, {}

        def started(*args: Any, **options: Any) -> Any:
            engine = start(*args, **options)
            wait()
            return engine

        def loaded(config: Any) -> Any:
            target = config.model, config.quantization, config.tp_size
            if target not in targets:
                targets.clear()
                targets[target] = load_target(config)
            return targets[target]

        steady.Load.run, adaptive.time_rounds = locked(steady.Load.run), locked(adaptive.time_rounds)
        traffic.serve, engines.load_target = locked(traffic.serve), loaded
        status = 0
        for arguments in commands:
            fcntl.flock(starting, fcntl.LOCK_SH)
            compiles_first = arguments[0] in ("decode", "load")  # what its loads need, and times these alone
            engines.start = start if compiles_first else started
            status = (_train(locked) if arguments[0] == "compare" else main)(arguments) or status
            for each in (starting, file):
                fcntl.flock(each, fcntl.LOCK_UN)
            gc.collect()  # the engine's pages
        return status


def _train(locked: Callable) -> Callable:
    from jaxspec.train import __main__ as training  # needs what benchmarks do without
    from jaxspec.train import loop

    loop.train = locked(loop.train)
    return training.main


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    given = groupby(sys.argv[2:], lambda argument: argument == "--")
    sys.exit(run(sys.argv[1], [list(each) for between, each in given if not between]))
