"""`load_model`: from a path or an id to a config, params on the device and a tokenizer."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.cache.memory_check import out_of_memory
from jaxspec.checkpoint import kv_scales, packed, vision
from jaxspec.checkpoint.check import CheckpointError, TensorInfo, check
from jaxspec.checkpoint.find import Source, resolve
from jaxspec.checkpoint.gguf import packing
from jaxspec.checkpoint.gguf.file import GgufFile
from jaxspec.checkpoint.ngrams import check_hashes
from jaxspec.checkpoint.params import THREADS, assemble, dummy
from jaxspec.checkpoint.quantization import Quantization, as_stored, quantised_on_load, to_dequantise, unused
from jaxspec.checkpoint.shards import ModelFolder
from jaxspec.config.engine_config import ANY_ON_LOAD, EngineConfig
from jaxspec.config.options import ConfigError
from jaxspec.config.progress import bytes_bar, took
from jaxspec.config.request import IN_CHECKPOINTS, RequestError, SamplingParams
from jaxspec.images.image_reader import ImageReader
from jaxspec.models.families import MODELS
from jaxspec.models.local import by_request, in_groups, local
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.rope import of_context
from jaxspec.parallel import sharding
from jaxspec.text.tokenizer import Tokenizer

log = logging.getLogger("jaxspec")

MTP = "mtp."  # what the names of a multi-token prediction module's tensors begin with, beside the model's own
MTP_PARTS = {  # parts of a module in DeepSeek's layout and MiMo-V2's, and in Qwen's
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "shared_head.norm.": "norm.",
    "final_layernorm.": "norm.",
    "pre_mlp_layernorm.": "layers.0.post_attention_layernorm.",
    "self_attn.attention_sink_bias": "layers.0.self_attn.sinks",
}
MTP_OF_ERNIE = {"block": "", "emb_norm": "enorm.", "hidden_norm": "hnorm.", "linear_proj": "eh_proj."}  # in DeepSeek's
MTP_HALVES = {  # parts of a module in Nemotron's layout, and in Qwen's
    "layers.0.enorm.": "pre_fc_norm_embedding.",
    "layers.0.hnorm.": "pre_fc_norm_hidden.",
    "layers.0.eh_proj.": "fc.",
    "layers.0.norm.": "layers.0.input_layernorm.",
    "layers.0.mixer.": "layers.0.self_attn.",
    "layers.1.norm.": "layers.0.post_attention_layernorm.",
    "layers.1.mixer.": "layers.0.mlp.",
    "layers.1.final_layernorm.": "norm.",
}
KEYS_VALUES = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\..*")
# Of multimodal models, beside the text model.
OTHER_PARTS = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "audio_tower.")
OTHER_PARTS += ("embed_vision.", "embed_audio.")


@dataclass(frozen=True, eq=False)
class Model:
    """A model ready to run.

    **Attributes:**

    - `params`: arrays and `Weight`s on the device, in the structure of `family.tensors(config.decoder)`.
    - `dtype`: of activations, and so of embeddings, norms and all weights that aren't quantised.
    - `name`: what the user typed. `path`: the folder or file that it was read from.
    - `tokenizer`: None if the checkpoint has none; token ids can still be generated.
    - `sampling`: the sampling settings of its generation_config.json, under `SamplingParams`' names.
    - `quantization`: how its config says that the checkpoint is quantised; None if it isn't, whatever was asked for.
    - `tp_size`: how many devices its params are divided among.
    - `kv_scales`: f32[l, 2, m], what keys (0) and values (1) of each KV head are divided by in an FP8 cache, by its
      checkpoint; None if that doesn't say.
    - `image_reader`: how it takes pictures; None for a model without vision.
    - `tower`: arrays of `config.tower`, which reads pictures; None if there is none.
    """

    config: ModelConfig
    params: Any
    dtype: str
    name: str
    path: str | None
    tokenizer: Tokenizer | None
    sampling: Mapping[str, float] = field(default_factory=dict)
    quantization: Quantization | None = None
    tp_size: int = 1
    kv_scales: np.ndarray | None = None
    image_reader: ImageReader | None = None
    tower: Any = None

    @property
    def family(self) -> ModuleType:
        """The module that reads this model's config and declares its tensors."""
        return MODELS[self.config.model_type]

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids of the vocabulary that end a text, by its config, its tokenizer and its family."""
        extra, vocab = self.tokenizer.eos_token_ids if self.tokenizer else (), self.config.vocab_size
        added = self.tokenizer.added_tokens if self.tokenizer else {}
        ends = [added[name] for name in getattr(self.family, "ENDS", ()) if name in added]
        return tuple(dict.fromkeys(token for token in (*self.config.eos_token_ids, *extra, *ends) if token < vocab))


def load_model(
    path_or_id: str,
    dtype: str | None = None,
    *,
    load_format: str = "auto",
    revision: str | None = None,
    seed: int = 0,
    progress: bool = True,
    quantization: str | None = None,
    fp8_activations: bool = True,
    tp_size: int = 1,
    ep_size: int = 1,
    dp_attention: bool = False,
    context_length: int | None = None,
    allow_longer_context: bool = False,
    deterministic: bool = False,
    load_threads: int = THREADS,
) -> Model:
    """Find a model, and read it onto the device.

    **Arguments:**

    - `path_or_id`: a hub id, a folder, a .gguf file, or "smollm2-135m-instruct" for the demo (see `resolve`).
    - `dtype`: of the params, `float32`, `bfloat16` or `float16`. None is float32 on a CPU, else the checkpoint's own.
    - `load_format`: `auto`, or `dummy` for random weights made from the config and `seed` alone.
    - `progress`: show a progress bar on stderr.
    - `quantization`: `fp8`, `int4` or `nvfp4` quantises weights of matmuls one by one as they are read; head, router
      and embedding stay in `dtype`. A checkpoint that is quantised already stays as it is, but `fp8` makes FP8 of
      packed weights in four bits, too.
    - `fp8_activations`: quantise the activations of FP8 weights, too, instead of leaving them in `dtype`.
    - `tp_size`: shard the params over so many devices. The engine runs such a model, `functional` doesn't.
    - `ep_size`: divide experts among so many groups of these devices.
    - `dp_attention`: divide the requests of latent attention among them, not its heads.
    - `context_length`: most tokens of a text, by which LongRoPE chooses its factors; None: the model's positions.
    - `allow_longer_context`: take a model of fewer positions, too.
    - `deterministic`: dequantise GGUF files, since such an engine has no kernels of four bits.
    - `load_threads`: how many threads read its weights.

    **Raises:** `CheckpointError`, `ConfigError` or `TokenizerError`, each naming the option, file, key or tensor at
    fault.
    """
    options = EngineConfig(
        model=path_or_id,
        dtype=dtype,
        load_format=load_format,
        revision=revision,
        seed=seed,
        quantization=quantization,
        fp8_activations="on" if fp8_activations else "off",
        tp_size=tp_size,
        ep_size=ep_size,
        dp_attention=dp_attention,
        context_length=context_length,
        allow_longer_context=allow_longer_context,
        deterministic=deterministic,
        load_threads=load_threads,
    )
    return load_target(options, progress)


def load_target(options: EngineConfig, progress: bool = True) -> Model:
    """The model that an engine's options name. **Raises:** as `load_model`."""
    mesh = sharding.mesh_of(options.tp_size)  # refuses more devices than there are
    source, config, dtype, declared = _declared(options)
    how, made_up = kept_format(source.files, options.quantization), options.load_format == "dummy"
    seed, tp_size = options.seed or 0, options.tp_size
    renamed = partial(text_name, layers=config.num_layers, sharing=config.decoder.sharing)
    beside = ThreadPoolExecutor(1, "tokenizer")  # which takes seconds, most of them imports
    reading = beside.submit(_tokenizer, source)
    beside.shutdown(wait=False)
    try:
        if made_up:
            with took("made up weights"):
                params = jax.block_until_ready(dummy(declared, dtype, seed, mesh))
        else:
            if (how_packed := source.files.packed) is not None:
                log.info("%s: %s", source.name, packed.told(how_packed, dtype, options.quantization))
            elif isinstance(source.files, GgufFile) and source.files.why_unpacked and packing.kernels_here():
                log.info("%s: %s", source.name, source.files.why_unpacked)
            named = {"rename": renamed, "progress": progress, "mesh": mesh, "threads": options.load_threads}
            named["fp8_activations"] = options.quantises_activations
            params = read_params(declared, source.files, source.name, dtype, **named)
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise _no_room(source.name, declared, dtype, tp_size) from error
    sampling = _sampling(source.files.generation, source.name)
    tokenizer, scales = reading.result(), None
    _warn_of_tokens_beyond(source.name, config, tokenizer)
    if not made_up:
        scales = kv_scales.read_kv_scales(source.files, config.decoder, renamed)
        check_hashes(source.files, config.decoder, renamed)
    tower = vision.load(config.tower, source.files, dtype, options.load_format, seed) if config.tower else None
    reader = source.files.image_reader(tokenizer) if tower is not None else None
    of = source.name, source.path, tokenizer, sampling, how, tp_size, scales, reader, tower
    return Model(config, params, dtype, *of)


def _warn_of_tokens_beyond(name: str, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """Log which tokens of the tokenizer, and which end tokens, the model's vocabulary lacks."""
    if tokenizer is not None and (largest := tokenizer.vocab_size - 1) >= config.vocab_size:
        log.warning(
            "%s: its tokenizer has token ids up to %d, the model 0 to %d; texts with those beyond are refused",
            *(name, largest, config.vocab_size - 1),
        )
    if beyond := [token for token in config.eos_token_ids if token >= config.vocab_size]:
        log.warning(
            "%s: its end token %d is beyond the vocabulary of %d tokens, and is left out",
            *(name, beyond[0], config.vocab_size),
        )


def _no_room(name: str, declared: Any, dtype: str, tp_size: int) -> CheckpointError:
    """The error of weights that a device has no memory for."""
    item = jax.numpy.dtype(dtype).itemsize
    own = [sharding.local_param(param, tp_size) for param in jax.tree.leaves(declared)]
    size = sum(math.prod(param.shape) * (param.format.bytes_each or item) for param in own)
    quantised = sorted({type(param.format).__name__.lower() for param in own if param.format.bytes_each})
    each = f" on each of {tp_size} devices, more than one" if tp_size > 1 else ", more than the device"
    ways = ["use a smaller model"]
    ways += [] if quantised else [f"--quantization {ANY_ON_LOAD}", "a smaller --dtype"]
    ways += ["a larger --tp-size"]
    return CheckpointError(
        f"{name}: its weights take {size / 2**30:,.1f} GiB in {' and '.join(quantised) or dtype}{each} has free; "
        f"{', '.join(ways[:-1])}, or {ways[-1]}"
    )


def outlined(options: EngineConfig) -> Model:
    """The model that an engine's options name, without arrays and tokenizer: its params are shapes, those that one of
    --tp-size devices has, and of a quantised checkpoint the formats are those that its config names. The devices
    needn't be here. **Raises:** as `load_model`."""
    source, config, dtype, declared = _declared(options, made_up=True)
    if options.tp_size > 1:
        sharding.check_params(declared, options.tp_size)
        declared = jax.tree.map(partial(sharding.local_param, size=options.tp_size), declared)
    params = jax.eval_shape(partial(dummy, declared, dtype, 0))
    tower = jax.eval_shape(partial(vision.dummy, config.tower, dtype, 0)) if config.tower else None
    how = kept_format(source.files, options.quantization, not options.deterministic)
    return Model(config, params, dtype, source.name, source.path, None, quantization=how, tower=tower)


def _declared(options: EngineConfig, made_up: bool = False) -> tuple[Source, ModelConfig, str, Any]:
    """Where a model is, its config, its dtype and its declarations. `made_up`: in a quantised checkpoint's formats."""
    source = resolve(options.model, options.revision, load_format=options.load_format)
    config = source.config
    if options.deterministic and isinstance(source.files, GgufFile):
        source.files.packed = source.files.quantization = None
    if config.tower and options.load_format != "dummy" and not vision.found(config.tower, source.files):
        config = replace(config, tower=None)  # a text model's files beside a multimodal config
    dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else config.dtype)
    if not options.allow_longer_context:
        check_context(options.context_length, config, source.name)
    config = replace(config, decoder=of_context(config.decoder, options.context_length or config.max_position))
    try:
        config = replace(config, decoder=in_groups(config.decoder, options.tp_size, options.ep_size))
        if options.dp_attention:
            config = replace(config, decoder=by_request(config.decoder, options.tp_size))
        local(config.decoder, options.tp_size)  # refuses what can't be divided before it is read
    except ConfigError as error:
        raise ConfigError(f"{source.name}: {error}") from error
    declared = MODELS[config.model_type].tensors(config.decoder)
    how = kept_format(source.files, options.quantization, made_up and not options.deterministic)
    of = options.quantization, "dummy" if made_up else options.load_format, options.quantises_activations
    return source, config, dtype, in_format(declared, how, *of)


def _tokenizer(source: Source) -> Tokenizer | None:
    with took("read the tokenizer"):
        return source.files.tokenizer()


def check_context(length: int | None, config: ModelConfig, name: str) -> None:
    """**Raises:** `ConfigError` for a context longer than the model's positions."""
    if length is not None and length > (most := config.max_position):
        raise ConfigError(
            f"--context-length {length} exceeds the {most} positions of {name}; give {most} or less, or add "
            "--allow-longer-context"
        )


def in_format(
    declared: Any, how: Quantization | None, quantization: str | None, load_format: str, fp8_activations: bool
) -> Any:
    """Declarations with the formats that the options ask for: of weights quantised on load, or dummies of quantised
    ones. `how`: what the checkpoint's config says; of weights that are there, their files decide (`read_params`)."""
    wanted = quantization is not None if how is None else load_format == "dummy"
    if not wanted:
        return declared
    made = jax.tree.map(lambda param: quantised_on_load(param, fp8_activations, how, quantization), declared)
    exact = [param for param in jax.tree.leaves(made) if param.of_matmul and not param.exact]
    exact = [param.sources[0] for param in exact if not param.format.quantised]
    if how is None and exact:
        log.info("%d weights can't be %s and stay as they are: %s, ...", len(exact), quantization, exact[0])
    return made


def kept_format(files: ModelFolder | GgufFile, quantization: str | None, made_up: bool = False) -> Quantization | None:
    """How a checkpoint's weights are quantised, if they stay so (`Packed.stays`). `made_up`: on a GPU."""
    how = files.packed_on_gpu() if made_up and isinstance(files, GgufFile) else files.packed
    if how is None:
        return files.quantization
    return how.quantization if how.stays(quantization) else None


def _sampling(generation: Mapping[str, Any], name: str) -> dict[str, float]:
    """The sampling settings of a generation_config.json; those that can't be used are logged and left out."""
    usable = {}
    for field_name in IN_CHECKPOINTS:
        if (value := generation.get(field_name)) is not None:
            try:
                usable[field_name] = getattr(SamplingParams(**{field_name: value}), field_name)
            except RequestError as error:
                log.warning("%s: generation_config.json is ignored where it says: %s", name, error)
    return usable


def text_name(name: str, layers: int, sharing: Container[int] = ()) -> str | None:
    """A tensor's name in the text model alone, of so many layers; None for other parts: a vision tower, MTP modules.

    Layers that are `sharing` keys and values of others may have the matrices that made some; nobody reads them.
    """
    name = name.removeprefix("language_model.")  # of all, as Gemma 3 was first published
    if name.startswith(("layers.", "embed_tokens.", "norm.")):  # of a model without a head, as embeddings have it
        name = f"model.{name}"
    if name.removeprefix("model.").startswith((*OTHER_PARTS, MTP, "mtp_")):
        return None
    name = name.replace("model.language_model.", "model.", 1)
    if sharing and (own := KEYS_VALUES.fullmatch(name)) and int(own[1]) in sharing:
        return None
    return None if _further_layer(name, layers) else name


def mtp_name(name: str, layers: int) -> str | None:
    """An MTP tensor's name in Qwen's layout, `mtp.*`; None for other tensors, and for copies of the model's own.

    DeepSeek's layout has modules as further layers of the model, behind its `layers`, MiMo-V2's below `model.mtp`, and
    ERNIE's as `model.mtp_block` and others, by number. Each has a projection and norms of its own; those of module 1
    are called `mtp.layers.1.fc` and so on. Nemotron's layout has a module's attention and its MLP as two layers, of one
    norm each.
    """
    if name.startswith(f"{MTP}hyper_connection_mixer.block_inject_weight."):  # which nothing reads
        return None
    if name.startswith(MTP):
        theirs = next((theirs for theirs in MTP_HALVES if name.startswith(MTP + theirs)), "")
        return f"{MTP}{MTP_HALVES[theirs]}{name.removeprefix(MTP + theirs)}" if theirs else name
    if below := re.fullmatch(rf"model\.{re.escape(MTP)}layers\.(\d+)\.(.+)", name):
        found = int(below[1]), below[2]
    elif ernies := re.fullmatch(rf"model\.mtp_({'|'.join(MTP_OF_ERNIE)})\.(\d+)\.(.+)", name):
        found = int(ernies[2]), MTP_OF_ERNIE[ernies[1]] + ernies[3]
    else:
        found = _further_layer(name, layers)
    if found is None:
        return None
    module, part = found
    if part.startswith(("embed_tokens.", "shared_head.head.", "shared_head.weight")):
        return None
    theirs = next((theirs for theirs in MTP_PARTS if part.startswith(theirs)), "")
    ours = MTP_PARTS.get(theirs, "layers.0.")
    ours = f"layers.{module}.{ours.removeprefix('layers.0.')}" if module else ours
    return f"{MTP}{ours}{part.removeprefix(theirs)}"


def _further_layer(name: str, layers: int) -> tuple[int, str] | None:
    """Which layer a tensor belongs to behind a model's own, from 0, and its name there; None if to none."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    return (int(found[1]) - layers, found[2]) if found and int(found[1]) >= layers else None


def read_params(
    declared: Any,
    files: ModelFolder | GgufFile,
    name: str,
    dtype: str,
    *,
    rename: Callable[[str], str | None] = str,
    skip: Container[str] = (),
    progress: bool = True,
    fp8_activations: bool = False,
    mesh: Mesh | None = None,
    threads: int = THREADS,
) -> Any:
    """Fill a pytree of `Param` from a checkpoint's files, whose tensors are called `rename(their name)`.

    Those whose new name is None, or in `skip`, are left alone. Weights that the file has in FP8 stay so. `mesh` and
    `threads`: as of `assemble`.

    **Raises:** `CheckpointError` listing every tensor that is missing, unexpected or of another shape than declared.
    """

    def listed(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        renamed = ((rename(tensor), info) for tensor, info in tensors.items())
        return {new: info for new, info in renamed if new is not None and new not in skip}

    found = listed(files.tensors())
    declared = jax.tree.map(lambda param: param.as_found(found), declared)
    how, whole = files.quantization, set()
    if files.packed is not None and (whole := _to_dequantise(declared, files, found, rename, mesh)):
        log.info("%s: %d weights can't stay packed and are dequantised: %s, ...", name, len(whole), min(whole))
        found = listed(files.tensors(whole))
    found, left = {k: v for k, v in found.items() if not unused(k)}, [k for k in found if unused(k)]
    if left := [k for k in left if not kv_scales.named(k)]:
        log.info("%s: %d scales like %s are not used: see docs/quantisation.md", name, len(left), left[0])
    if how is not None:
        stored = partial(as_stored, found=found, how=how, activations=fp8_activations, where=str(files.path))
        declared = jax.tree.map(stored, declared)
    if files.packed is not None and isinstance(files, ModelFolder):
        found = _without_zero_biases(declared, files, found, rename)
        orders = {param.order for param in jax.tree.leaves(declared)}  # of fused weights, one says it for all
        spare = {rename(f"{module}.order") for module in files.orders} - orders
        found = {name: info for name, info in found.items() if name not in spare}
    check(jax.tree.leaves(declared), found, str(files.path))
    there = (files.stored(whole) if whole else files.stored()).items()
    tensors = {new: tensor for stored, tensor in there if (new := rename(stored)) in found}
    total = sum(found[tensor].nbytes for tensor in tensors)
    with bytes_bar(total, f"loading {name}", progress) as read:
        return assemble(
            declared,
            tensors,
            dtype,
            mesh,
            threads=threads,
            done=lambda names: read(sum(found[tensor].nbytes for tensor in names)),
        )


def _to_dequantise(
    declared: Any,
    files: ModelFolder | GgufFile,
    found: Mapping[str, TensorInfo],
    rename: Callable[[str], str | None],
    mesh: Mesh | None,
) -> set[str]:
    """Packed weights, called as in the files, that parameters need unquantised."""
    orders = {}
    if isinstance(files, ModelFolder):
        orders = {rename(f"{module}.order"): order for module, order in files.orders.items()}
    whole = to_dequantise(jax.tree.leaves(declared), found, orders, divided=mesh is not None)
    return {name for name in files.tensors() if rename(name) in whole} if whole else set()


def _without_zero_biases(
    declared: Any, files: ModelFolder, found: dict[str, TensorInfo], rename: Callable[[str], str | None]
) -> dict[str, TensorInfo]:
    """`found` without biases of zeros that the model doesn't have: AutoGPTQ gives every layer one."""
    strange = found.keys() - {name for param in jax.tree.leaves(declared) for name in param.sources}
    spare = {name for name in files.tensors() if name.endswith(".bias") and rename(name) in strange}
    zeros = {rename(name) for name, values in files.some(spare) if not values.any()}
    return {name: info for name, info in found.items() if name not in zeros}
