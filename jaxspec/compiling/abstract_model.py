"""A model and its drafter by their shapes alone, from their configs: what memory is planned by, and programs compiled.

So a start needn't wait for weights: they load in a thread while the first programs compile (`Loading`).
"""

from __future__ import annotations

import contextvars
import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax

from jaxspec.checkpoint import GgufFile, Model, load_target, locate, outlined
from jaxspec.config.engine_config import EngineConfig
from jaxspec.drafters import loading
from jaxspec.drafters.loading import LoadedDrafter, check_drafter, load_drafter


def drafter_of(options: EngineConfig, model: Model) -> LoadedDrafter:
    """The drafter's shapes, with dummy weights. What it borrows of the target is the target's very shape, so that it
    counts once."""
    options = dataclasses.replace(options, load_format="dummy")
    kept, borrowed = [], []

    def loaded(params):
        found = load_drafter(options.draft, dataclasses.replace(model, params=params), options)
        lender = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(params))}
        kept.append(found)
        borrowed.extend(lender.get(id(leaf)) for leaf in jax.tree.leaves(found.params))
        return found.params

    leaves, structure = jax.tree.flatten(jax.eval_shape(loaded, model.params))
    theirs = jax.tree.leaves(model.params)
    own = [leaf if i is None else theirs[i] for leaf, i in zip(leaves, borrowed, strict=True)]
    return dataclasses.replace(kept[0], params=jax.tree.unflatten(structure, own))


class Loading:
    """Model and drafter of an engine's options, on their way in a thread once they `begin`; `model` and `draft` are
    their shapes."""

    def __init__(self, options: EngineConfig, model: Model, draft: LoadedDrafter):
        self.model, self.draft, self._options = model, draft, options
        self._loaded: Future = Future()

    @classmethod
    def of(cls, options: EngineConfig) -> Loading | None:
        """None where shapes aren't known before weights are there, or aren't all that programs are made of."""
        if options.skip_warmup or options.deterministic or options.tp_size > 1 or options.draft_token_map is not None:
            return None
        check_drafter(options)
        if isinstance(locate(options.model, options.revision, load_format=options.load_format), GgufFile):
            return None
        model = outlined(options)
        if (draft := loading.outlined(options.draft, model, options)) is None:
            return None
        return cls(options, model, drafter_of(dataclasses.replace(options, draft=draft), model))

    def begin(self) -> None:
        """Load, once it is known that the engine can be made."""
        run = contextvars.copy_context().run
        threading.Thread(target=run, args=(self._load,), name="jaxspec-weights", daemon=True).start()

    def when_failed(self, call: Callable[[], None]) -> None:
        """Call this once loading has raised an exception, if it does."""
        self._loaded.add_done_callback(lambda done: done.exception() is not None and call())

    def result(self) -> tuple[Model, LoadedDrafter]:
        """Both, once they are there. **Raises:** what kept them from loading."""
        return self._loaded.result()

    def _load(self) -> None:
        try:
            model = load_target(self._options)
            self._loaded.set_result((model, load_drafter(self._options.draft, model, self._options)))
        except BaseException as error:
            self._loaded.set_exception(error)


def alike(one: Any, other: Any) -> bool:
    """Whether a program compiled for one pytree takes the other: its structure, shapes and dtypes."""
    shapes = lambda tree: (jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)])  # noqa: E731
    return shapes(one) == shapes(other)
