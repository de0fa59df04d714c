"""Adapters (LoRA) of an engine: those that are loaded, by name, and the device's arrays of those that have a place.

Loading reads a folder into the host's memory, in any thread. An adapter comes to the device with the first request that
is admitted with it, in the engine's thread, and nothing is compiled for it: the arrays have places for all.

Invariant: an adapter that was loaded is never changed. Another of the same name is another object with a number of its
own, so requests that began with the old one end with it, and keys of the prefix tree differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.checkpoint import CheckpointError, Model, peft
from jaxspec.checkpoint.params import assemble
from jaxspec.checkpoint.peft import Adapter
from jaxspec.config.engine_config import ADAPTER_NAME, EngineConfig
from jaxspec.config.json_values import shown
from jaxspec.config.options import ConfigError
from jaxspec.config.request import RequestError
from jaxspec.decoder.forward import describe, path_table
from jaxspec.decoder.low_rank import attached
from jaxspec.models.description import Decoder
from jaxspec.models.weights import LowRank
from jaxspec.parallel import sharding
from jaxspec.scheduling.adapter_places import AdapterPlaces

log = logging.getLogger("jaxspec")

FEWEST, MOST = 4, 32  # places, by default
RANKS, PLACES = 16, 4  # of the arrays: multiples of these, so that kernels take runs of 64 columns
UNKNOWN = "model_not_found"  # OpenAI's code


class Adapters:
    """The adapters of an engine with these options and model.

    **Attributes:** `stacks`, the device's arrays, by layer and weight; `rank`, what each is padded to; `count`, the
    places; `places`, whose they are, an `AdapterPlaces` for so many request slots.

    **Raises:** `CheckpointError` for a folder of `--lora-modules` that can't be served; `ConfigError`.
    """

    def __init__(self, config: EngineConfig, model: Model, num_slots: int):
        self._config, self._dtype, self._mesh = config, model.dtype, sharding.mesh_of(config.tp_size)
        self._tree = model.family.tensors(model.config.decoder)
        self._lock, self._numbers = threading.Lock(), itertools.count(secrets.randbits(48))
        self._loaded: dict[str, Adapter] = {}
        given = [
            peft.read_adapter(name, path, self._tree, config.max_lora_rank) for name, path in config.adapters.items()
        ]
        self.rank = config.max_lora_rank or peft.largest_rank(given)
        self._modules = self._wanted(set().union(*(adapter.modules for adapter in given)))
        self._declared = _declared(self._tree, self.rank, self._modules)
        self.count = _count(config)
        self._num_slots = num_slots
        for adapter in given:
            self.put(adapter)
        self.reset()

    def reset(self) -> None:
        """Empty all places. No request may hold one."""
        self.places, zeros = AdapterPlaces(self.count, self._num_slots), self._arrays(None)
        stacks = [
            {name: LowRank(*map(self._places_for, pair, (1, 0))) for name, pair in each.items()} for each in zeros
        ]
        self.stacks = _put(stacks, zeros, 0)  # which compiles what every adapter is written with

    @property
    def loaded(self) -> dict[str, str]:
        """The folders of the adapters, by name."""
        return {adapter.name: adapter.path for adapter in list(self._loaded.values())}

    def find(self, name: str | None) -> Adapter | None:
        """The adapter of this name; None for none. **Raises:** `RequestError` for a name that isn't loaded."""
        if name is None:
            return None
        if (found := self._loaded.get(name)) is None:
            known = ", ".join(map(repr, self._loaded)) or "none"
            raise RequestError(f"the adapter {shown(name)} isn't loaded; loaded: {known}", "lora", UNKNOWN)
        return found

    def load(self, name: str, path: str, replace: bool = False) -> None:
        """Read a folder, and serve it under a name. `replace`: one of that name may be there, whose requests go on.

        Any thread may call it. **Raises:** `CheckpointError`, `RequestError`.
        """
        if not (isinstance(name, str) and re.fullmatch(ADAPTER_NAME, name)):
            raise RequestError(
                f"an adapter's name must be 1 to 128 letters, digits and . _ : / + @ -, got {shown(name)}", "lora_name"
            )
        if not isinstance(path, str | Path):
            raise RequestError(f"an adapter's path must be a folder's, got {shown(path)}", "lora_path")
        self._check_new(name, replace)
        self.put(peft.read_adapter(name, path, self._tree, self.rank), replace)
        log.info("adapter %s: rank %d, from %s", name, self._loaded[name].rank, path)

    def put(self, adapter: Adapter, replace: bool = False) -> None:
        """Serve an adapter, as `load` does."""
        self._check_modules(adapter)
        with self._lock:
            self._check_new(adapter.name, replace)
            self._loaded[adapter.name] = dataclasses.replace(adapter, number=next(self._numbers))

    def unload(self, name: str) -> None:
        """Serve an adapter no more. Requests that have begun end with it. **Raises:** `RequestError`."""
        with self._lock:
            del self._loaded[self.find(name).name]

    def written(self) -> bool:
        """Write adapters that have new places into them. Whether there were any."""
        due, self.places.due = self.places.due, {}
        for place, adapter in due.items():
            began = time.monotonic()
            self.stacks = _put(self.stacks, self._arrays(adapter), place)
            log.info("adapter %s is on the device after %.0f ms", adapter.name, 1e3 * (time.monotonic() - began))
        return bool(due)

    def _check_new(self, name: str, replace: bool) -> None:
        if name in self._loaded:
            if not replace:
                raise RequestError(f"the adapter {name!r} is loaded already; unload it, or replace it", "lora_name")
        elif len(self._loaded) >= self._config.max_cpu_loras:
            raise RequestError(
                f"{len(self._loaded)} adapters are loaded, as many as --max-cpu-loras allows; unload one", "lora_name"
            )

    def _wanted(self, found: set[str]) -> set[str] | None:
        """The modules that adapters may change; None: all."""
        given, known = self._config.lora_target_modules, set(map(peft.module_of, peft.adaptable(self._tree)))
        if given and "all" not in given:
            if unknown := [name for name in given if name not in known]:
                raise ConfigError(
                    f"--lora-target-modules {unknown[0]} is no module that adapters may change; there are "
                    f"{', '.join(sorted(known))}"
                )
            return set(given)
        return None if given or self._config.enable_lora or self._config.lora_root or not found else found

    def _check_modules(self, adapter: Adapter) -> None:
        if self._modules is None:
            return
        weights = peft.adaptable(self._tree)
        for tensor in adapter.matrices:
            if not any(peft.module_of(each) in self._modules for each in weights[tensor][0].sources):
                raise CheckpointError(
                    f"{adapter.path} changes {peft.module_of(tensor)}, and there is room for "
                    f"{', '.join(sorted(self._modules))} alone; add it to --lora-target-modules"
                )

    def _arrays(self, adapter: Adapter | None) -> list[dict[str, tuple[jax.Array, jax.Array]]]:
        """A and B of all weights as the device has them, by layer and weight."""
        given = dict(peft.tensors(self._tree["layers"], adapter, self._declared))
        made = assemble(self._declared, given, self._dtype, self._mesh)
        return [{name: (a.unquantised, b.unquantised) for name, (a, b) in layer.items()} for layer in made]

    def _places_for(self, one: jax.Array, axis: int) -> jax.Array:
        """Zeros like this array for each place, along an axis of its own."""
        shape = _with_places(one.shape, self.count, axis)
        if self._mesh is None:
            return jnp.zeros(shape, one.dtype)
        spec = (*one.sharding.spec, None, None)[:2]
        there = NamedSharding(self._mesh, PartitionSpec(*spec[:axis], None, *spec[axis:]))
        return jnp.zeros(shape, one.dtype, device=there)


class Outline:
    """The arrays' shapes for an engine with these options and a model without arrays, as `bench plan` counts them.

    **Raises:** `ConfigError` if folders would have to be read for the rank.
    """

    def __init__(self, config: EngineConfig, model: Model):
        if config.adapters and config.max_lora_rank is None:
            raise ConfigError("bench plan reads no adapters; give the largest rank of --lora-modules: --max-lora-rank")
        named, count = config.lora_target_modules, _count(config)
        modules = None if not named or "all" in named else set(named)
        rank = config.max_lora_rank or peft.largest_rank(())
        declared = _declared(model.family.tensors(model.config.decoder), rank, modules)
        shape = lambda param, axis: jax.ShapeDtypeStruct(_with_places(param.shape, count, axis), model.dtype)  # noqa: E731
        self.stacks = [{name: LowRank(shape(a, 1), shape(b, 0)) for name, (a, b) in each.items()} for each in declared]


def _declared(tree: Mapping[str, Any], rank: int, modules: set[str] | None) -> list[dict[str, Any]]:
    return peft.declare(tree["layers"], -(-rank // RANKS) * RANKS, modules)


def _count(config: EngineConfig) -> int:
    return config.max_loras or min(max(len(config.adapters), FEWEST), MOST)


def _with_places(shape: tuple[int, ...], count: int, axis: int) -> tuple[int, ...]:
    return (*shape[:axis], -(-count // PLACES) * PLACES, *shape[axis:])


@partial(jax.jit, donate_argnums=0)
def _put(stacks: Any, arrays: Any, place: int) -> Any:
    """The arrays of all places, with one adapter's in its own."""

    def one(stack: LowRank, pair: tuple[jax.Array, jax.Array]) -> LowRank:
        return LowRank(stack.a.at[:, place].set(pair[0]), stack.b.at[place].set(pair[1]))

    whole = lambda leaf: isinstance(leaf, LowRank)  # noqa: E731
    return jax.tree.map(one, stacks, arrays, is_leaf=whole)


def present(adapters: Adapters | None) -> Adapters:
    """An engine's adapters. **Raises:** `ConfigError` if it has no room for any."""
    if adapters is None:
        raise ConfigError("this engine has no room for adapters; start it with --enable-lora or --lora-modules")
    return adapters


def salt_of(adapter: Adapter | None, own: str | None = None) -> int:
    """A key of 64 bits for an adapter as it was loaded and a request's own salt, to salt keys of the prefix tree; 0 for
    neither."""
    salt = 0 if adapter is None else adapter.number * 0xD6E8FEB86659FD93 % 2**64
    digest = b"" if own is None else hashlib.blake2b(own.encode(), digest_size=8).digest()
    return salt ^ int.from_bytes(digest)


def within(root: str | None, path: str) -> str:
    """A folder that a client names, which must lie in `root`; a relative one is one of its folders.

    **Raises:** `RequestError` if it lies elsewhere or is no path, or there is no root.
    """
    if root is None:
        raise RequestError(
            "clients may load no adapters here: the server would read folders that they name. Start it with "
            "--lora-root DIR to allow those of a folder",
            "lora_path",
        )
    top = Path(root).expanduser().resolve()
    try:
        found = (top / path).resolve()
        files = [found, *(file.resolve() for file in found.glob("adapter_*"))] if found.is_relative_to(top) else [found]
    except (OSError, RuntimeError, ValueError) as error:  # too long, links in a circle, characters that no path has
        raise RequestError(f"the path {shown(path)} can't be read: {shown(str(error))}", "lora_path") from error
    if not all(file.is_relative_to(top) for file in files):
        raise RequestError(f"the path {shown(path)} leaves the folder that adapters may be loaded from", "lora_path")
    return str(found)


def tell_paths(adapters: Adapters, decoder: Decoder, layers: Sequence[Mapping[str, Any]], *of: Any) -> None:
    """Log by which paths rows with adapters go. `of`: further arguments of `forward.path_table`.

    **Raises:** `ConfigError` if none takes them, as may be with `--deterministic`.
    """
    try:
        paths = path_table(decoder, attached(layers, adapters.stacks, None), *of, adapters=True)
    except NotImplementedError as error:
        raise ConfigError(str(error)) from error
    log.info("up to %d adapters of rank %d: %s", adapters.count, adapters.rank, describe(paths))


def with_adapters(params: Mapping[str, Any], adapters: Adapters | None) -> Mapping[str, Any]:
    """The target's weights, and its adapters' arrays beside them."""
    return params if adapters is None else {**params, "adapters": adapters.stacks}


def places_of(adapters: Adapters | None, slots: Sequence[int]) -> Any:
    """Places of the adapters of these slots; None where none of them has one."""
    places = None if adapters is None else adapters.places.of_slot[list(slots)]
    return places if places is not None and (places >= 0).any() else None
