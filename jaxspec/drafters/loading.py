"""Turn what `--draft` takes into a drafter with its weights: a method, a checkpoint, a class of the user's, or two."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import logging
import re
from collections.abc import Callable
from typing import Any

from jaxspec.checkpoint import CheckpointError, Model, ModelFolder, locate, may_be_model, resolve
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.json_values import shown
from jaxspec.config.options import ConfigError, check, flag, from_query
from jaxspec.config.own_code import import_own
from jaxspec.drafters import combined, dflash_checkpoint, eagle_checkpoint, mtp, standalone
from jaxspec.drafters.base import Drafter, NoDrafter
from jaxspec.drafters.combined import Combined
from jaxspec.drafters.mtp_modules import MtpModules
from jaxspec.drafters.own_weights import with_head_copy
from jaxspec.drafters.registry import (
    ARCHITECTURES,
    BLOCKS,
    DRAFTERS,
    HAVE_HEADS,
    KNOWN,
    OUTLINED,
    SHIPPED,
    TAKE_TOKEN_MAPS,
    WITHOUT_WEIGHTS,
    Known,
    card,
    find,
)
from jaxspec.drafters.standalone import Standalone
from jaxspec.drafters.vocabulary import read_token_map
from jaxspec.models.families import MODELS

log = logging.getLogger("jaxspec")

METHODS = ("none", "auto", *DRAFTERS)


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
    """A drafter with its params, as `jaxspec.propose` and the engine take it. `card`: what is published of it."""

    name: str
    drafter: Drafter
    params: Any
    card: Known | None = None


def load_drafter(draft: str, model: Model, options: EngineConfig | None = None) -> LoadedDrafter:
    """Find and load a drafter for a target model.

    **Arguments:** `draft`: what `--draft` takes, such as "ngram", "mtp", "eagle3:PATH_OR_ID" or "module:Class:PATH"
    (see `EngineConfig.draft`). `model`: the target, from `load_model`. `options`: the engine's; None is their defaults.

    **Raises:** `ConfigError` for a name that isn't known or a drafter that can't serve this model, `CheckpointError`
    for weights that can't be read.
    """
    if not isinstance(model, Model):
        raise ConfigError(f"model must be a loaded one, got {shown(model)}; load it first: jaxspec.load_model(...)")
    if not isinstance(draft, str):
        raise ConfigError(f"--draft must be a name or a path, got {shown(draft)}")
    options = options or EngineConfig(draft=draft)
    if draft == "none":
        return LoadedDrafter("none", NoDrafter(), {})
    if sides := combined.parts(draft):
        return _load_both(draft, *sides, model, options)
    if draft == "auto":
        draft = _automatic(model, options)
    cls, source, own = parse_draft(draft, model.name, options.load_format)
    _check_weights(cls, options)
    _check_devices(cls, options)
    ids = None
    if options.draft_token_map is not None and cls in TAKE_TOKEN_MAPS:  # else `auto` chose one, and a warning is logged
        ids = read_token_map(options.draft_token_map, model.config.vocab_size)
    loaded = cls.load(model, source, options, **_taken_by(cls.load, own))
    if not (isinstance(loaded, tuple) and len(loaded) == 2 and isinstance(loaded[0], Drafter)):
        raise ConfigError(
            f"--draft {draft}: {cls.__name__}.load must return a drafter and its params, got {shown(loaded)}"
        )
    drafter, params = loaded
    drafter = _with_options(drafter, own, draft)
    if ids is not None:
        params = drafter.with_token_map(params, ids)
    if options.draft_quantization is not None and cls in HAVE_HEADS:
        params = with_head_copy(params)
    if not isinstance(drafter.num_draft_tokens, int) or drafter.num_draft_tokens < 1:
        raise ConfigError(f"--draft {draft}: num_draft_tokens must be at least 1, got {drafter.num_draft_tokens!r}")
    layers, streams = model.config.num_layers, model.config.decoder.streams
    if bad := [i for i in drafter.feature_layers if not -1 <= i <= layers + (streams is not None)]:
        raise ConfigError(
            f"--draft {draft}: feature_layers {bad} don't exist; {model.name} has layers 0 to {layers - 1}; -1 "
            f"stands for the embedding and {layers} for the final norm"
        )
    if options.topk > 1 and drafter.topk == 1:
        raise ConfigError(
            f"--topk {options.topk}: --draft {draft} drafts chains, not trees; eagle, eagle3 and dflash do both"
        )
    method = next((method for method, each in DRAFTERS.items() if each is cls), "")
    published = None if options.load_format == "dummy" else card(method, source, model.name)
    return LoadedDrafter(draft, drafter, params, published)


def _load_both(draft: str, lookup: str, other: str, model: Model, options: EngineConfig) -> LoadedDrafter:
    """Load the two drafters of `lookup+other` as one."""
    first, second = (load_drafter(each.draft, model, each) for each in _sides(lookup, other, options))
    if isinstance(second.drafter, NoDrafter):
        raise ConfigError(f"--draft {draft}: {other} drafts nothing. Use --draft {lookup}")
    both = Combined(first.drafter, second.drafter)
    return LoadedDrafter(f"{first.name}+{second.name}", both, second.params, second.card)


def _sides(lookup: str, other: str, options: EngineConfig) -> tuple[EngineConfig, EngineConfig]:
    """The options of each side of a combination. Those of weights are the second's."""
    replace = dataclasses.replace
    drafts = options.num_draft_tokens or combined.LOOKED_UP
    own = {"draft_dtype": None, "draft_quantization": None, "draft_token_map": None, "topk": 1, "num_steps": None}
    return replace(options, draft=lookup, num_draft_tokens=drafts, **own), replace(options, draft=other)


def check_drafter(options: EngineConfig) -> None:
    """Find what `options.draft` names and read its config, which takes moments, before a target takes minutes to load.

    **Raises:** as `load_drafter`, of what needs no weights to be seen.
    """
    if sides := combined.parts(options.draft):
        for each in _sides(*sides, options):
            check_drafter(each)
        return
    if options.draft in ("none", "auto"):
        return
    cls, source, _ = parse_draft(options.draft, options.model, options.load_format)
    _check_weights(cls, options)
    _check_devices(cls, options)
    if source is not None and cls in DRAFTERS.values():  # a class of the user's reads what it likes
        locate(source, load_format=options.load_format)
    if cls in (Standalone, MtpModules):
        target = resolve(options.model, options.revision, load_format=options.load_format)
        if cls is Standalone:
            standalone.check(target, source, options.load_format)
        else:
            mtp.check(target, options.load_format)


def _check_devices(cls: type[Drafter], options: EngineConfig) -> None:
    """**Raises:** `ConfigError` for a drafter that doesn't say how it runs on several devices."""
    if options.tp_size > 1 and cls.on_one_of is Drafter.on_one_of:
        raise ConfigError(
            f"--tp-size {options.tp_size} with --draft {options.draft}: this drafter runs on one device, since it "
            f"doesn't override on_one_of. Those that run on several are {', '.join(DRAFTERS)}"
        )


def _check_weights(cls: type[Drafter], options: EngineConfig) -> None:
    """**Raises:** `ConfigError` for a dtype or a format of a drafter without weights, and for a token map of one that
    can't take it. If `auto` chose a drafter without weights, a warning is logged instead."""
    if cls not in WITHOUT_WEIGHTS:
        if options.draft_token_map is not None and cls not in TAKE_TOKEN_MAPS:
            others = ", ".join(method for method, each in DRAFTERS.items() if each in TAKE_TOKEN_MAPS)
            raise ConfigError(
                f"--draft-token-map {options.draft_token_map}: --draft {options.draft} needs the target's whole "
                f"vocabulary; {others} don't. Drop the flag"
            )
        return
    for name in ("draft_dtype", "draft_quantization", "draft_token_map"):
        if (value := getattr(options, name)) is None:
            continue
        if options.draft != "auto":
            raise ConfigError(f"{flag(name)} {value}: --draft {options.draft} has no weights. Drop the flag")
        log.warning("%s %s has no effect: --draft auto chose a drafter without weights", flag(name), value)


def parse_draft(draft: str, target: str, load_format: str) -> tuple[type[Drafter], str | None, dict[str, Any]]:
    """The drafter's class, where its weights are, and its own options, of what `--draft` takes.

    `target` is the target model's name. **Raises:** `ConfigError`; `CheckpointError` for a config that can't be read.
    """
    name, _, query = draft.partition("?")
    cls, source = _find_class(name, target, load_format)
    return cls, source, from_query(cls, query, name)


def _find_class(draft: str, target: str, load_format: str) -> tuple[type[Drafter], str | None]:
    method, _, source = draft.partition(":")
    if method in DRAFTERS:
        if method in KNOWN:
            source = source or _known(method, target)
            if not may_be_model(source):
                raise ConfigError(
                    f"--draft {draft}: the drafter {source!r} wasn't found: no such file or folder, and not a hub id"
                )
            return _of_blocks(method, source, load_format) if method in BLOCKS else DRAFTERS[method], source
        if source:
            raise ConfigError(f"--draft {draft}: {method} takes no model; use --draft {method}")
        return DRAFTERS[method], None
    if ours := re.fullmatch(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*)(?::(.+))?", draft):  # module:Class:PATH
        return _import(ours[1]), ours[2]
    return _by_config(draft, load_format), draft


def _of_blocks(method: str, source: str, load_format: str) -> type[Drafter]:
    """DFlash's method takes its descendants too, by their config. The descendants' take their own kind alone."""
    try:
        found = dflash_checkpoint.recognise(dflash_checkpoint.open_folder(source, load_format).hf)
    except ConfigError:
        return DRAFTERS[method]  # whose `load` says the same with the target's name
    if method not in ("dflash", found):
        raise ConfigError(f"--draft {method}:{source} is a drafter of another kind; use --draft {found}:{source}")
    return DRAFTERS[found]


def _taken_by(load: Callable[..., Any], own: dict[str, Any]) -> dict[str, Any]:
    """Pick the drafter's own options that its `load` has parameters for."""
    names = inspect.signature(load).parameters
    return {name: value for name, value in own.items() if name in names}


def _with_options(drafter: Drafter, own: dict[str, Any], draft: str) -> Drafter:
    """The drafter with these of its own options. **Raises:** `ConfigError` naming one that can't be."""
    try:
        drafter = dataclasses.replace(drafter, **own) if own else drafter
        check(drafter, str)
    except ConfigError as error:
        raise ConfigError(f"--draft {draft}: {error}") from error
    return drafter


def outlined(draft: str, model: Model, options: EngineConfig) -> str | None:
    """`draft`, or what `auto` stands for, if the drafter's shapes follow from its config; else None."""
    if draft == "auto":
        if (model.config.recurrent or model.config.mtp_layers) and options.load_format != "dummy":
            return None  # its files decide
        draft = _automatic(model, options)
    if draft == "none":
        return draft
    if combined.parts(draft):
        return None
    cls, _, _ = parse_draft(draft, model.name, options.load_format)
    return draft if cls in OUTLINED else None


def _automatic(model: Model, options: EngineConfig) -> str:
    """The best method that fetches nothing: n-grams suit every model, but are the weakest."""
    if mtp.preferred(model, options.load_format):
        return "mtp"
    known = find("eagle3", model.name)
    shipped = known is not None and known.source.startswith(str(SHIPPED))
    return "eagle3" if shipped and options.load_format != "dummy" else "ngram"


def _known(method: str, target: str) -> str:
    if found := find(method, target):
        return found.source
    raise ConfigError(
        f"--draft {method}: no drafter is known for {target}. Name one with --draft {method}:PATH_OR_ID. "
        f"Known targets: {', '.join(sorted(KNOWN[method])) or 'none'}"
    )


def _import(draft: str) -> type[Drafter]:
    module_name, _, name = draft.partition(":")
    try:
        module = import_own(f"--draft {draft}", module_name)
    except ImportError as e:
        raise ConfigError(
            f"--draft {draft}: can't import {module_name!r} ({e}). Run from the folder that holds it, or set "
            f"PYTHONPATH. Methods: {', '.join(METHODS)}{_nearest(draft)}"
        ) from e
    cls = getattr(module, name, None)
    if not (isinstance(cls, type) and issubclass(cls, Drafter)):
        found = [
            k for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, Drafter) and v is not Drafter
        ]
        raise ConfigError(
            f"--draft {draft}: {module_name} has no class {name} that subclasses jaxspec.draft.Drafter; "
            f"found: {', '.join(found) or 'none'}"
        )
    return cls


def _nearest(draft: str) -> str:
    near = difflib.get_close_matches(draft.partition(":")[0].lower(), METHODS, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _by_config(draft: str, load_format: str) -> type[Drafter]:
    """The method of a drafter named by path or hub id alone."""
    try:
        files = locate(draft, load_format=load_format)
    except CheckpointError as e:
        why = _nearest(draft) or f", no module:Class, and no model that can be read: {e}"
        raise ConfigError(f"--draft {draft} is no method ({', '.join(METHODS)}){why}") from e
    if not isinstance(files, ModelFolder):
        return Standalone
    architectures, model_type = files.hf.get("architectures") or (), files.hf.get("model_type")
    if not isinstance(architectures, list) or not all(isinstance(each, str) for each in architectures):
        raise ConfigError(f"--draft {draft}: its config's architectures must be a list of names, got {architectures!r}")
    for architecture in architectures:
        if architecture in ARCHITECTURES:
            method = ARCHITECTURES[architecture]
            return _of_blocks("dflash", draft, load_format) if method in BLOCKS else DRAFTERS[method]
    if method := eagle_checkpoint.recognise(files):
        return DRAFTERS[method]
    if model_type in MODELS:
        return Standalone
    raise ConfigError(
        f"--draft {draft}: its config names architectures {', '.join(architectures) or 'none'} and model_type "
        f"{model_type!r}; drafters are {', '.join(ARCHITECTURES)}, and models of type {', '.join(MODELS)}"
    )
