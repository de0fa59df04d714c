"""New weights in the place of an engine's own: from a pytree, by Hugging Face names, or from a folder.

Programs take params as arguments, so nothing is compiled again: every new array has the shape, dtype and sharding of
the one before it, and its format. An array that has these already is taken as it is, without a copy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoint import CheckpointError, Model, load_target, mtp_name
from jaxspec.checkpoint.load import text_name
from jaxspec.checkpoint.params import assemble, quantised
from jaxspec.compiling.xla_options import NOTHING_TIMED
from jaxspec.config.engine_config import ANY_ON_LOAD, EngineConfig
from jaxspec.config.options import ConfigError
from jaxspec.drafters import mtp
from jaxspec.drafters.loading import LoadedDrafter, load_drafter
from jaxspec.drafters.mtp_modules import MtpModules
from jaxspec.drafters.own_weights import with_head_copy
from jaxspec.engine.deterministic import prepared
from jaxspec.models.vision import PREFIXES
from jaxspec.models.weights import Param, Weight
from jaxspec.parallel import sharding

BY_NAME = "a mapping of Hugging Face names to arrays"


@dataclasses.dataclass(frozen=True)
class Update:
    """Weights that are ready to take others' places: leaves of the target's declarations, the drafter's params by name,
    and the vision tower's, each with the layers that it is of (None: all of the array). Where a leaf, or all of a part,
    is None, the weights stay that the engine has when the update is applied. `version` names the result."""

    target: list[Any] | None
    draft: Mapping[str, Any] | None
    tower: Mapping[str, tuple[list[int] | None, Any]] | None = None
    version: str | None = None


def read(model: Model, draft: LoadedDrafter, config: EngineConfig, target: Any, drafter: Any) -> Update:
    """Make an update of what a caller gives. It computes on the device, and changes nothing.

    `target` and `drafter`: None, or a pytree of the engine's own structure; for the target, and for an MTP module and a
    vision tower with it, also a mapping of Hugging Face names to arrays, which may name some parameters alone.

    **Raises:** `CheckpointError` naming what doesn't fit, or what isn't finite.
    """
    tower = module = None
    if target is None and drafter is None:
        raise CheckpointError("an update needs weights: of the target, of the drafter, or both")
    if _by_names(target, model.params):
        of = model.config.num_layers, model.config.decoder.sharing
        names = {text_name(name, *of): array for name, array in target.items()}
        modules = {mtp_name(name, model.config.num_layers): array for name, array in target.items()}
        names.pop(None, None), modules.pop(None, None)
        if model.tower is not None and (own := {n: array for n, array in target.items() if PREFIXES.match(n)}):
            tower = _tower(model, own)
        if modules and drafter is None and isinstance(draft.drafter, mtp.Mtp):
            module = _module(draft, modules)
        if names or not (modules or tower):
            target = _named(_leaves(declared(model)), _leaves(base(model)), names, model.dtype, config.tp_size)
        else:
            target = None
    elif target is not None:
        target = _fitted(declared(model), base(model), _without_derived(model, target), "target")
    update = Update(target, module if drafter is None else _drafters(draft, drafter), tower)
    _check_finite(model, update)
    return update


def read_folders(
    model: Model, draft: LoadedDrafter, config: EngineConfig, target: str | None, drafter: str | None
) -> Update:
    """Make an update of folders, or hub ids, in the engine's own dtype and format. An MTP module comes with its target,
    if that has one. **Raises:** `CheckpointError`, `ConfigError`."""
    loaded, made = model, None
    if target is not None:
        loaded = load_target(dataclasses.replace(config, model=target))
        own = model.config.decoder
        asked = {name: getattr(own, name) for name in ("deterministic", "reports_experts")}
        if dataclasses.replace(loaded.config.decoder, **asked) != own:
            raise CheckpointError(f"{target} is another model than {model.name}: their configs describe other layers")
        if isinstance(draft.drafter, mtp.Mtp) and drafter is None and mtp.found(loaded, config.load_format):
            made = load_drafter("mtp", loaded, config)
    if drafter is not None:
        method = draft.name.partition("?")[0].partition(":")[0]
        name = f"{method}:{drafter}" if ":" in draft.name or draft.name == method else drafter
        made = load_drafter(name, loaded, config)
    update = read(model, draft, config, None if target is None else loaded.params, made and made.params)
    whole = loaded is not model and model.tower is not None
    tower = {name: (None, array) for name, array in loaded.tower.items()} if whole else None
    shared = {id(array) for array in jax.tree.leaves(loaded.params)}
    own = lambda value: not any(id(array) in shared for array in jax.tree.leaves(value))  # noqa: E731
    parts = None if made is None else {name: each for name, each in update.draft.items() if own(each)}
    return dataclasses.replace(update, draft=parts, tower=tower)


def applied(model: Model, draft: LoadedDrafter, config: EngineConfig, update: Update) -> tuple[Model, LoadedDrafter]:
    """Model and drafter with the update. What the drafter borrows of the target is the new target's."""
    new = model
    if update.target is not None:
        structure = jax.tree.structure(base(model), is_leaf=_whole)
        params = _merged(jax.tree.unflatten(structure, update.target), base(model))
        new = prepared(dataclasses.replace(model, params=params), draft, config)
    if update.tower is not None:
        tower = {name: _with_layers(model.tower[name], *given) for name, given in update.tower.items()}
        new = dataclasses.replace(new, tower=model.tower | tower)
    params = draft.params
    if isinstance(params, Mapping):
        given = {name: _merged(each, params[name]) for name, each in (update.draft or {}).items()}
        params = {name: each for name, each in params.items() if name != "head_copy"} | given
        params |= draft.drafter.derived(params, config.tp_size) if update.draft else {}
        params = _followed(params, model.params, new.params)
        params = with_head_copy(params) if "head_copy" in draft.params else params
    return new, dataclasses.replace(draft, params=params)


def check_follows(draft: LoadedDrafter, config: EngineConfig) -> None:
    """**Raises:** `ConfigError` for a drafter with a copy of the target's head that nothing here makes again."""
    if config.draft_token_map is not None:
        raise ConfigError(
            f"--draft-token-map {config.draft_token_map}: {draft.name} drafts with some columns of the target's head, "
            "which don't follow an update of the target. Start the engine without the flag"
        )
    if config.draft_dtype not in (None, config.dtype):
        raise ConfigError(
            f"--draft-dtype {config.draft_dtype}: {draft.name} drafts with a cast copy of the target's head, which "
            "doesn't follow an update of the target. Start the engine without the flag"
        )


def declared(model: Model) -> Any:
    """Declarations of a model's params, before `--deterministic` prepares them."""
    return model.family.tensors(model.config.decoder)


def base(model: Model) -> Any:
    """A model's params without what `--deterministic` makes of them."""
    return _without_derived(model, model.params)


def _without_derived(model: Model, params: Any) -> Any:
    if isinstance(params, Mapping) and model.config.decoder.deterministic and model.config.decoder.tied:
        return {name: each for name, each in params.items() if name != "head"}
    return params


def _whole(leaf: Any) -> bool:
    return isinstance(leaf, Weight | Param)


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=_whole)


def _merged(given: Any, old: Any) -> Any:
    """A tree with `old`'s leaves where the given ones are None."""
    return jax.tree.map(
        lambda leaf, before: before if leaf is None else leaf, given, old, is_leaf=lambda x: x is None or _whole(x)
    )


def _with_layers(old: Any, layers: list[int] | None, given: Any) -> Any:
    return given if layers is None else old.at[jnp.array(layers)].set(given)


def _by_names(given: Any, params: Any) -> bool:
    return isinstance(given, Mapping) and bool(given) and not given.keys() <= params.keys()


def _named(declared: list[Param], old: list[Any], given: dict[str, Any], dtype: str, devices: int) -> list[Any]:
    """Leaves for arrays by name. Those of a fused parameter come together."""
    declared = [param.as_found(given) for param in declared]
    left = given.keys() - {name for param in declared for name in param.sources} - {"lm_head.weight"}
    if left:
        others = f"; {len(left) - 1} others aren't its either" if len(left) > 1 else ""
        raise CheckpointError(f"the model has no {min(left)}, which was given{others}")
    wanted, places = [], []
    for place, (param, before) in enumerate(zip(declared, old, strict=True)):
        found = [name for name in param.sources if name in given]
        if not found:
            continue
        if len(found) < len(param.sources):
            lacking = next(name for name in param.sources if name not in given)
            raise CheckpointError(f"{found[0]} was given without {lacking}; they are one parameter here: give both")
        for name, shape in param.stored_values().items():
            if _shape(name, given[name]) != shape:
                raise CheckpointError(f"{name} is {list(given[name].shape)}, the model's is {list(shape)}")
        if isinstance(before, Weight) and before.quantised:
            _check_makes(before, found[0])
            param = dataclasses.replace(param, format=before.format, scales=())
        wanted.append(param)
        places.append(place)
    if not wanted:
        raise CheckpointError("none of the tensors that were given is a parameter of the model")
    mesh = sharding.mesh_of(devices)
    made = assemble(wanted, given, dtype, mesh)
    out: list[Any] = [None] * len(old)
    for place, leaf in zip(places, made, strict=True):
        out[place] = _placed(leaf, old[place], declared[place].sources[0])
    return out


def _fitted(declared: Any, old: Any, given: Any, whose: str) -> list[Any]:
    """Leaves of a pytree that has the structure of the declarations."""
    paths, structure = jax.tree_util.tree_flatten_with_path(declared, is_leaf=_whole)
    leaves, theirs = jax.tree.flatten(given, is_leaf=_whole)
    if structure != theirs:
        raise CheckpointError(f"the {whose}'s weights must be {BY_NAME}, or have the structure of its params")
    out = []
    for (path, param), leaf, before in zip(paths, leaves, _leaves(old), strict=True):
        name = whose + jax.tree_util.keystr(path)
        if isinstance(before, Weight) and not isinstance(leaf, Weight):
            raise CheckpointError(f"{name} must be a Weight, got {type(leaf).__name__}")
        if isinstance(before, Weight) and before.quantised and not leaf.quantised:
            _check_makes(before, name)
            wanted = (before.outputs, before.inputs) if param.stacked else (before.inputs, before.outputs)
            if leaf.values.shape != (wanted := (*before.values.shape[:-2], *wanted)):
                raise CheckpointError(f"{name} is {list(leaf.values.shape)}, the engine's is {list(wanted)}")
            leaf = quantised(dataclasses.replace(param, format=before.format), leaf.values, before)
        out.append(_placed(leaf, before, name, param.shape))
    return out


def _check_makes(weight: Weight, name: str) -> None:
    """**Raises:** `CheckpointError` for a format that isn't made of unquantised weights while they are updated."""
    own = weight.format
    if not own.made_on_load:
        raise CheckpointError(
            f"{name}: the engine's is {own}, which isn't made of unquantised weights; give it as a folder has "
            f"it, or start the engine with --quantization {ANY_ON_LOAD}"
        )


def _check_finite(model: Model, update: Update) -> None:
    """**Raises:** `CheckpointError` naming a weight that has NaN or infinity."""
    given = [] if update.target is None else zip(_leaves(declared(model)), update.target, strict=True)
    trees = {param.sources[0]: leaf for param, leaf in given if leaf is not None}
    trees |= {f"vision tower: {name}": each for name, (_, each) in (update.tower or {}).items()}
    trees |= {f"drafter[{name!r}]": each for name, each in (update.draft or {}).items()}
    named = [(name, array) for name, tree in trees.items() for array in jax.tree.leaves(tree)]
    alike: dict[Any, list[int]] = {}
    for place, (_, array) in enumerate(named):
        alike.setdefault((array.shape, str(array.dtype)), []).append(place)
    # Eight of a shape at once: a call for each array takes longer than the check. The last ones alone, so that an
    # update of other weights finds its programs.
    several = [places[at : at + 8] for places in alike.values() for at in range(0, len(places) - 8, 8)]
    several += [[place] for places in alike.values() for place in places[(len(places) - 1) // 8 * 8 :]]
    flags = jax.device_get([_finite([named[place][1] for place in places]) for places in several])
    found = zip(several, flags, strict=True)
    if bad := sorted(place for places, each in found for place, ok in zip(places, each, strict=True) if not ok):
        others = f", as have {len(bad) - 1} others" if len(bad) > 1 else ""
        raise CheckpointError(f"{named[bad[0]][0]} has numbers that aren't finite{others}")


@partial(jax.jit, compiler_options=NOTHING_TIMED)  # rounds may run, also ones that wait for another device's
def _finite(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(array).all() for array in arrays])


def _tower(model: Model, given: dict[str, Any]) -> dict[str, tuple[list[int] | None, Any]]:
    """The vision tower's parameters for arrays by Hugging Face names, as `Update` has them."""
    tower, found = model.config.tower, dict[str, dict[int, Any]]()
    for name, array in given.items():
        if (own := tower.parameter(name)) is None:
            raise CheckpointError(f"the vision tower has no {name}")
        key, layer = own
        if array.size != math.prod(shape := tower.shapes[key]) or len(array) != shape[0]:
            raise CheckpointError(f"{name} is {list(array.shape)}, the vision tower's is {list(shape)}")
        found.setdefault(key, {})[layer] = jnp.asarray(array, model.tower[key].dtype).reshape(shape)
    return {
        key: (list(each), jnp.stack([*each.values()])) if key.startswith(tower.per_layer) else (None, each[0])
        for key, each in found.items()
    }


def _placed(given: Any, before: Any, name: str, shape: tuple[int, ...] | None = None) -> Any:
    """A leaf with the dtype and sharding of the one before it: the same arrays if it has them.

    `shape`: another that is allowed, of a weight that is padded later."""
    mine, structure = jax.tree.flatten(before)
    arrays, theirs = jax.tree.flatten(given)
    if structure != theirs:
        raise CheckpointError(f"{name} has another format or layout than the engine's")
    out = []
    for array, old in zip(arrays, mine, strict=True):
        if _shape(name, array) not in (old.shape, shape):
            raise CheckpointError(f"{name} is {list(array.shape)}, the engine's is {list(old.shape)}")
        cast = array if array.dtype == old.dtype else array.astype(old.dtype)
        there = isinstance(old, jax.ShapeDtypeStruct) or _where(cast) == _where(old)
        out.append(cast if there else jax.device_put(cast, old.sharding))
    return jax.tree.unflatten(structure, out)


def _shape(name: str, array: Any) -> tuple[int, ...]:
    """**Raises:** `CheckpointError` for what is no array."""
    if not hasattr(array, "shape"):
        raise CheckpointError(f"{name} must be an array, got {type(array).__name__}")
    return array.shape


def _where(array: Any) -> tuple[Any, bool] | None:
    """Where an array is, as programs that take it are compiled for; None: not on a device."""
    return (array.sharding, array.committed) if isinstance(array, jax.Array) else None


def _drafters(draft: LoadedDrafter, given: Any) -> dict[str, Any]:
    """The drafter's params by name, as they are to be."""
    own = draft.params
    if not isinstance(own, Mapping) or not own:
        raise CheckpointError(f"--draft {draft.name} has no weights to update")
    if not isinstance(given, Mapping) or (strange := given.keys() - own.keys()):
        found = min(strange) if isinstance(given, Mapping) else type(given).__name__
        raise CheckpointError(f"the drafter's weights are a mapping of some of {', '.join(sorted(own))}; got {found}")
    out = {}
    for name, value in given.items():
        leaves, theirs = jax.tree.flatten(value, is_leaf=_whole)
        old, structure = jax.tree.flatten(own[name], is_leaf=_whole)
        if structure != theirs:
            raise CheckpointError(f"the drafter's {name!r} has another structure than the engine's")
        pairs = zip(leaves, old, strict=True)
        out[name] = jax.tree.unflatten(structure, [_placed(new, before, f"drafter[{name!r}]") for new, before in pairs])
    return out


def _module(draft: LoadedDrafter, given: dict[str, Any]) -> dict[str, Any]:
    """An MTP module's params for arrays by name, None for those that aren't given."""
    drafter = draft.drafter
    several = mtp.Modules(drafter.modules, drafter.separate) if isinstance(drafter, MtpModules) else mtp.ONE
    tree = mtp.parameters(drafter.config, several)
    old = {name: draft.params[name] for name in tree}
    made = _named(_leaves(tree), _leaves(old), given, drafter.dtype, 1)
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=_whole), made)


def _followed(params: Any, old: Any, new: Any) -> Any:
    """A drafter's params with the new target's arrays where they were the old one's."""
    if old is new:
        return params
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    by_id = {id(before): after for before, after in pairs}
    return jax.tree.map(lambda array: by_id.get(id(array), array), params)


def moved(model: Model, draft: LoadedDrafter, move: Callable[[Any], Any]) -> tuple[Model, LoadedDrafter]:
    """Model, its vision tower and drafter with each array moved. What they share is moved once, and stays shared."""
    done: dict[int, Any] = {}

    def once(array: Any) -> Any:
        if id(array) not in done:
            done[id(array)] = move(array)
        return done[id(array)]

    params, tower, drafts = jax.tree.map(once, (model.params, model.tower, draft.params))
    return dataclasses.replace(model, params=params, tower=tower), dataclasses.replace(draft, params=drafts)
