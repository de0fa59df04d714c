"""Adapters (LoRA) in PEFT's folders: `adapter_config.json`, and the matrices A and B of each module that they change.

A folder is a stranger's. All that it says is checked before a tensor is read, and whatever would change the model in
another way than `y += scale * B(A x)` is refused by its name.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import regex

from jaxspec.checkpoint.check import CheckpointError, read_json, refuse_stand_in
from jaxspec.checkpoint.load import text_name
from jaxspec.checkpoint.shards import open_shard
from jaxspec.config.engine_config import MOST_LORA_RANK
from jaxspec.config.json_values import shown
from jaxspec.models.weights import WHOLE, Param, Unquantised, linear

# The weights of a layer whose every product adds what adapters do.
ADAPTED = frozenset({
    *("qkv", "out", "gate_up", "up", "down"),
    *("qkvz", "ba", "in", "latents", "queries", "latent_in", "latent_out"),
    *("gates", "steps", "output_gates"),
})  # fmt: skip
CONFIG, WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
PATTERN_SECONDS = 0.1  # that a pattern may take for a module's name
# Keys of a config that change what an adapter computes, and why each is refused where it is set.
REFUSED = {
    "use_dora": "DoRA scales whole weights by learned magnitudes",
    "modules_to_save": "it replaces whole modules",
    "target_parameters": "it changes experts' stacked weights",
    "trainable_token_indices": "it changes embeddings",
    "layer_replication": "it repeats layers",
    "lora_bias": "it has biases",
    **dict.fromkeys(
        ("use_qalora", "use_bdlora", "alora_invocation_tokens", "velora_config", "arrow_config", "kasa_config",
         "monteclora_config", "megatron_config"), "it is another kind of adapter"),
}  # fmt: skip
REPLACING = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")  # initialisations that change the model's weights
PARTS = {
    "lora_embedding_": "it changes embeddings",
    "lora_magnitude_vector": "it is DoRA",
    "modules_to_save": "it replaces whole modules (modules_to_save)",
    "bias": "it has biases",
    "embed_tokens": "it has an embedding of its own, as for new tokens",
    "lm_head": "it has a head of its own, as for new tokens",
}


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter on the host. `matrices`: for each tensor of the model that it changes, A [rank, inputs] and B
    [outputs, rank] with the scale in it. `number`: which of all that were loaded it is, from 1."""

    name: str
    path: str
    rank: int
    matrices: Mapping[str, tuple[np.ndarray, np.ndarray]]
    number: int = 0

    @property
    def modules(self) -> set[str]:
        """The last parts of the names of modules that it changes, as "q_proj"."""
        return set(map(module_of, self.matrices))


def module_of(tensor: str) -> str:
    return tensor.removesuffix(".weight").rpartition(".")[2]


def adaptable(declared: Mapping[str, Any]) -> dict[str, tuple[Param, int]]:
    """By name of a checkpoint's tensor, the parameter that an adapter may change there, and which source it is."""
    return {
        source: (param, i)
        for layer in declared["layers"]
        for name, param in layer.items()
        if name in ADAPTED
        for i, source in enumerate(param.sources)
    }


def read_adapter(name: str, folder: str | Path, declared: Mapping[str, Any], rank: int | None = None) -> Adapter:
    """Read a folder that PEFT's `save_pretrained` wrote, for a model with these parameters.

    `rank`: the largest that is allowed; None: `MOST_LORA_RANK`.

    **Raises:** `CheckpointError` naming the file, key or tensor that can't be served.
    """
    try:
        folder = Path(folder).expanduser()
        config_file = folder / CONFIG
        there = config_file.is_file()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{shown(str(folder))} can't be read as a folder: {shown(str(error))}") from error
    if not there:
        raise CheckpointError(f"{folder} has no {CONFIG}; give a folder that PEFT's save_pretrained wrote")
    config = read_json(config_file)
    _check_config(config, config_file)
    file = next((folder / each for each in WEIGHTS if (folder / each).is_file()), None)
    if file is None:
        raise CheckpointError(f"{folder} has neither {' nor '.join(WEIGHTS)}; give a folder that PEFT wrote")
    refuse_stand_in(file)
    known, matrices, largest = adaptable(declared), {}, 0
    most = MOST_LORA_RANK if rank is None else rank
    with open_shard(file) as shard:
        pairs = _pairs(shard.keys(), known, len(declared["layers"]), file)
        for tensor, (module, a, b) in pairs.items():
            param, i = known[tensor]
            shapes = tuple(shard.get_slice(a).get_shape()), tuple(shard.get_slice(b).get_shape())
            own = _checked_rank(shapes, param, i, a, file)
            wanted = _by_pattern(config, "rank_pattern", "r", module, config_file)
            if own != wanted:
                raise CheckpointError(f"{file}: {a} has rank {own}, and {CONFIG} says {wanted} for it")
            if own > most:
                raise CheckpointError(
                    f"{file}: {a} has rank {own}, at most {most} is served; --max-lora-rank, up to {MOST_LORA_RANK}, "
                    "sets it"
                )
            alpha = _by_pattern(config, "alpha_pattern", "lora_alpha", module, config_file)
            scale = alpha / (math.sqrt(own) if config.get("use_rslora") else own)
            with np.errstate(over="ignore", invalid="ignore"):
                values = [shard.get_tensor(each).astype(np.float32) for each in (a, b)]
                values[1] = values[1] * np.float32(scale)
            if not all(np.isfinite(each).all() for each in values):
                raise CheckpointError(f"{file}: {a} or its B has numbers that aren't finite; save the adapter again")
            matrices[tensor], largest = tuple(values), max(largest, own)
    return Adapter(name, str(folder), largest, matrices)


def _check_config(config: Mapping[str, Any], file: Path) -> None:
    if str(config.get("peft_type", "LORA")).upper() != "LORA":
        raise CheckpointError(f"{file}: peft_type is {shown(config['peft_type'])}; only LORA is served")
    for key, why in REFUSED.items():
        if config.get(key):
            raise CheckpointError(f"{file}: {key} is {shown(config[key])}: {why}, which isn't served; train without")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{file}: bias is {shown(config['bias'])}: biases aren't served; train with bias='none'")
    made = config.get("init_lora_weights")
    if isinstance(made, str) and made.lower().startswith(REPLACING):
        raise CheckpointError(
            f"{file}: init_lora_weights is {shown(made)}, which changes the model's own weights; save the adapter with "
            "path_initial_model_for_weight_conversion"
        )
    for key in ("r", "lora_alpha"):
        if not _is_number(config.get(key), whole=key == "r"):
            what = "an integer of at least 1" if key == "r" else "a number"
            raise CheckpointError(f"{file}: {key} must be {what}, got {shown(config.get(key))}")
    for key in ("rank_pattern", "alpha_pattern"):
        given = config.get(key) or {}
        if not isinstance(given, dict) or not all(_is_number(each, key == "rank_pattern") for each in given.values()):
            raise CheckpointError(f"{file}: {key} must map names of modules to numbers, got {shown(given)}")


def _is_number(value: Any, whole: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return False
    return 1 <= value <= 2**20 if whole else abs(value) <= 2.0**20


def _by_pattern(config: Mapping[str, Any], key: str, otherwise: str, module: str, file: Path) -> float:
    """The value of the first pattern that a module's name ends with, as PEFT has it; `otherwise`, of that key."""
    for pattern, value in (config.get(key) or {}).items():
        try:
            if regex.match(rf"(.*\.)?({pattern})$", module, timeout=PATTERN_SECONDS):
                return value
        except (regex.error, TimeoutError, RecursionError) as error:
            raise CheckpointError(
                f"{file}: {key} {shown(pattern)} is no pattern that can be matched: {error}"
            ) from error
    return config[otherwise]


def _pairs(names: Iterable[str], known: Mapping[str, Any], layers: int, file: Path) -> dict[str, tuple[str, str, str]]:
    """By the model's tensor: the module's name in the adapter, and its tensors A and B."""
    found: dict[str, dict[str, str]] = {}
    modules: dict[str, str] = {}
    for name in names:
        inner = name.removeprefix("base_model.model.")
        parsed = re.fullmatch(r"(.+)\.lora_([AB])(?:\.default)?\.weight", inner)
        if parsed is None:
            why = next((why for part, why in PARTS.items() if part in inner), "it is no matrix of LoRA's")
            raise CheckpointError(f"{file}: {shown(name)} isn't served: {why}; train without it")
        module, half = parsed.groups()
        tensor = _tensor_of(module, known, layers)
        if tensor is None:
            if (layer := re.search(r"\blayers\.(\d{1,9})\.", module)) and int(layer[1]) >= layers:
                raise CheckpointError(
                    f"{file}: {shown(name)} changes layer {layer[1]}, and the model has layers 0 to {layers - 1}. The "
                    "adapter is for another model"
                )
            raise CheckpointError(
                f"{file}: {shown(name)} changes a module that isn't served. Adapters may change {_served(known)} of "
                "dense layers, and no expert, router, embedding or head"
            )
        if half in found.setdefault(tensor, {}):
            raise CheckpointError(f"{file}: {shown(name)} is there twice")
        found[tensor][half], modules[tensor] = name, module
    if not found:
        raise CheckpointError(f"{file} has no tensors; save the adapter again")
    if lacking := next((each for each, halves in found.items() if len(halves) < 2), None):
        raise CheckpointError(f"{file}: {next(iter(found[lacking].values()))} comes without its other matrix")
    return {tensor: (modules[tensor], halves["A"], halves["B"]) for tensor, halves in found.items()}


def _tensor_of(module: str, known: Mapping[str, Any], layers: int) -> str | None:
    """The model's tensor for a module's name, which may have been wrapped once more, or once less."""
    for name in (module, f"model.{module}", module.removeprefix("model.")):
        if (tensor := text_name(f"{name}.weight", layers)) in known:
            return tensor
    return None


def _served(known: Mapping[str, Any]) -> str:
    return ", ".join(dict.fromkeys(map(module_of, known)))


def _checked_rank(shapes: Sequence[tuple[int, ...]], param: Param, i: int, a: str, file: Path) -> int:
    """The rank by the matrices' shapes, which must fit the model's."""
    (*rank, inputs), (outputs, *same) = (shape or (0,) for shape in shapes)
    if (inputs, outputs) != (param.shape[0], param.layout.splits[i]) or len(rank) != 1 or rank != same or not rank[0]:
        raise CheckpointError(
            f"{file}: {a} is {list(shapes[0])} and its B {list(shapes[1])}; the model's weight takes [rank, "
            f"{param.shape[0]}] and [{param.layout.splits[i]}, rank]"
        )
    return rank[0]


def declare(layers: Sequence[Mapping[str, Param]], rank: int, modules: Collection[str] | None) -> list[dict[str, Any]]:
    """Declarations of the matrices of one adapter, by layer and weight: A `[inputs, parts * rank]`, and B
    `[parts * rank, outputs]`, in which each of the weight's parts has a block. They are divided as the weight is.

    `modules`: the names of those that adapters may change, all sources of a weight if of one; None: all.
    """

    def both(param: Param) -> tuple[Param, Param]:
        width, along = rank * len(param.sources), param.split and param.split.along
        sizes = dict(zip(_named("B", param), param.layout.splits, strict=True))
        inner = linear(
            param.shape[0], {_named("A", param)[0]: width}, split=param.split if along == "inputs" else WHOLE
        )
        outer = replace(linear(width, sizes), layout=param.layout, shape=(width, param.shape[1]), least=param.least)
        return inner, replace(outer, split=param.split if along == "outputs" else WHOLE, format=Unquantised())

    wanted = lambda param: modules is None or any(module_of(source) in modules for source in param.sources)  # noqa: E731
    return [
        {name: both(param) for name, param in layer.items() if name in ADAPTED and wanted(param)} for layer in layers
    ]


def _named(half: str, param: Param) -> list[str]:
    return [f"{source}.lora_{half}" for source in param.sources]


def tensors(
    layers: Sequence[Mapping[str, Param]], adapter: Adapter | None, declared: Sequence[Mapping[str, Any]]
) -> Iterable[tuple[str, np.ndarray]]:
    """The host arrays of what `declare` has declared, padded with zeros; all zeros for no adapter."""
    matrices = {} if adapter is None else adapter.matrices
    for layer, pairs in zip(layers, declared, strict=True):
        for name, (inner, _) in pairs.items():
            param, width = layer[name], inner.shape[1]
            rank = width // len(param.sources)
            first = np.zeros((width, inner.shape[0]), np.float32)
            for i, (source, outputs) in enumerate(zip(param.sources, param.layout.splits, strict=True)):
                a, b = matrices.get(source, (None, None))
                second = np.zeros((outputs, width), np.float32)
                if a is not None:
                    first[i * rank : i * rank + len(a)] = a
                    second[:, i * rank : i * rank + len(a)] = b
                yield _named("B", param)[i], second
            yield _named("A", param)[0], first


def largest_rank(adapters: Iterable[Adapter]) -> int:
    """The rank to make room for, a multiple of eight."""
    most = max(itertools.chain((adapter.rank for adapter in adapters), (16,)))
    return -(-most // 8) * 8
