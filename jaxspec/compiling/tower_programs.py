"""Programs of a vision tower, one for each number of patches that it has sizes for."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from jaxspec.compiling import xla_options
from jaxspec.compiling.executable_store import Executables
from jaxspec.compiling.lowering import shape_of
from jaxspec.decoder.towers import Patches, embed_pictures, places
from jaxspec.models.vision import Tower
from jaxspec.pallas import hopper
from jaxspec.pallas.hopper.export import not_in_jax_cache
from jaxspec.parallel import sharding

log = logging.getLogger("jaxspec")


class TowerPrograms:
    """Compiled ahead by `warm_up` or on first use, or found in `store`. Each puts the embeddings of some pictures into
    rows of an array, which has `rows` of them and is donated.

    `sizes`: patches of each program, ascending. `params`: the tower's, whose shapes alone count. `mesh`: devices that
    all run the programs.
    """

    def __init__(
        self, tower: Tower, params: Any, rows: int, sizes: tuple[int, ...], mesh: Mesh | None, store: Executables | None
    ):
        self.sizes, self._tower, self._rows, self._store = sizes, tower, rows, store
        self._params = jax.tree.map(partial(shape_of, sharded=mesh is not None), params)
        read, self._there, self._options = partial(_read, tower), None, {}
        if mesh is not None:
            self._options = xla_options.NOTHING_TIMED  # see `xla_options.WITH_PEERS`
            read = sharding.spread(read, mesh, sharding.EVERYWHERE, sharding.EVERYWHERE)
            self._there = NamedSharding(mesh, sharding.EVERYWHERE)
        self._jit, self._kernels = jax.jit(read, donate_argnums=1), hopper.requested_kernels()
        self._compiled: dict[int, Any] = {}
        self._guard = threading.Lock()
        self._behind: threading.Thread | None = None

    @property
    def starting(self) -> bool:
        """Whether some are still to come of a start in stages."""
        return self._behind is not None and self._behind.is_alive()

    @property
    def largest(self) -> Any:
        """The largest program; None until it is compiled."""
        return self._compiled.get(self.sizes[-1])

    def get(self, size: int, dtype: str) -> Callable[..., Array]:
        """The program of one of `sizes` for an array of this dtype: of `_read`'s arguments, the tower apart."""
        with self._guard:  # one is compiled at a time, by whoever comes first
            if size not in self._compiled:
                self._compiled[size] = self._made(size, dtype)
            return self._compiled[size]

    def warm_up(self, dtype: str, staged: bool) -> None:
        """Have all of them; in a `staged` start behind it, in a thread of their own."""
        if not staged:
            return self._get_all(dtype)
        self._behind = threading.Thread(target=self._get_all, args=[dtype], name="jaxspec-tower", daemon=True)
        self._behind.start()

    def _get_all(self, dtype: str) -> None:
        started = time.monotonic()
        for size in self.sizes:
            if not threading.main_thread().is_alive():
                return
            self.get(size, dtype)
        log.info("the vision tower's %d programs are ready, after %.1f s", len(self.sizes), time.monotonic() - started)

    def _made(self, size: int, dtype: str) -> Any:
        tower, key = self._tower, ("tower", size)
        held = jax.ShapeDtypeStruct((self._rows, tower.columns), dtype, sharding=self._there)
        into = np.zeros(size // tower.per_token, np.int32)
        arguments = self._params, held, np.zeros((size, tower.patch), np.float32), places(tower, [], size), into
        if self._store is not None and (kept := self._store.load(key, arguments)) is not None:
            program, kernels = kept
            hopper.KERNELS.update(kernels)
            return program
        cache = contextlib.nullcontext() if self._store is None else not_in_jax_cache()
        with hopper.use_kernels(self._kernels), hopper.counting() as kernels, cache:
            lowered = self._jit.lower(*arguments)
            program = xla_options.compiled(lowered, self._options, f"pictures of {size} patches")
        if self._store is not None:
            self._store.save(key, arguments, program, kernels)
        return program


def _read(
    tower: Tower,
    params: Any,
    held: Float[Array, "n d"],
    pixels: Float[Array, "p v"],
    patches: Patches | None,
    into: Int[Array, " t"],
) -> Float[Array, "n d"]:
    """Put the embeddings of pictures' tokens into these rows of `held`."""
    made = embed_pictures(tower, params, pixels, patches)
    return held.at[into].set(made.astype(held.dtype), mode="drop")
