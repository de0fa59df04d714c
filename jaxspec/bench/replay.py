"""The round program by itself: dispatched again and again from the same state, with nothing read in between.

The engine loop's time beyond this is the engine's own. The requests are wound back so that the replay runs through the
contexts at which the loop was timed, over their own filled pages.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench import profile
from jaxspec.bench.results import Row
from jaxspec.engine.runner import Runner
from jaxspec.rounds.packing import Slots
from jaxspec.rounds.programs import State

NAMES = "round", "rounds"  # methods of `Programs`
MOST = 50  # dispatches timed
LEAST = 4  # fewer say nothing
SETTLING = 3  # dispatches before the timed ones
PROFILED = 10  # dispatches under the profiler, at most


class Replay:
    """Stands in for a runner's round programs to remember which was called last, and with what."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self._programs = {name: getattr(runner.programs, name) for name in NAMES}
        self._last: tuple[str, np.ndarray, tuple[Any, ...]] | None = None
        for name in NAMES:
            setattr(runner.programs, name, partial(self._remember, name))

    def _remember(self, name: str, state: State, packed: np.ndarray, *how: Any) -> tuple[State, jax.Array]:
        self._last = name, packed, how
        return self._programs[name](state, packed, *how)

    def close(self) -> None:
        for name in NAMES:
            delattr(self._runner.programs, name)  # the class's own is found again

    def figures(self, context: float, accepted: float, profiled: bool) -> Row | None:
        """Time the program last dispatched, at a mean context of `context` tokens: `program_ms` per round, and if
        `profiled` its `kernels`, per round as well.

        `accepted` is the mean number of tokens that a request gains in a round. None if the requests aren't far enough
        beyond `context` to wind back. Leaves every request as it was.
        """
        runner, (name, packed, _) = self._runner, self._last
        burst = runner.shapes.rounds if name == "rounds" else 1
        saved = jax.tree.map(jnp.copy, runner.state.slots)
        slots = packed[packed[:, 0] < runner.shapes.num_slots, 0]
        length, prompt = np.asarray(saved.length)[slots], np.asarray(saved.prompt)[slots]
        beyond, half = length.mean() - context, burst * accepted / 2
        # Half of the replay comes before `context`. It may not reach into a prompt, nor, if all drafts were accepted,
        # past what is known.
        times = int(min(MOST, ((length - prompt).min() - beyond) / half, beyond / (burst * runner.width - half)))
        if times < LEAST:
            return None
        start = jnp.maximum(saved.length - int(beyond + times * half), 1)  # of idle slots too, which nobody reads
        self._run(saved, start, SETTLING)
        began = self._run(saved, start, times)
        figures: Row = {"program_ms": (time.perf_counter() - began) / (times * burst) * 1e3}
        if profiled:
            times = min(times, PROFILED)
            figures["kernels"] = profile.kernels(lambda: self._run(saved, start, times), times * burst)
        runner.state = runner.state.replace(slots=saved)
        return figures

    def _run(self, saved: Slots, length: jax.Array, times: int) -> float:
        """Dispatch `times` programs from slots of this `length` and wait; the time when the first was dispatched."""
        runner = self._runner
        slots = jax.tree.map(jnp.copy, saved).replace(length=jnp.copy(length))
        runner.state = jax.block_until_ready(runner.state.replace(slots=slots))
        name, packed, how = self._last
        began = time.perf_counter()
        for _ in range(times):
            runner.state, out = self._programs[name](runner.state, packed, *how)
        jax.block_until_ready(out)
        return began
