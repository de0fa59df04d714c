"""Options: a field of a frozen dataclass, made by `option`, says all that there is to say about one.

Its default, what is allowed, its flag's words and its place in --help stand together. Command lines (`config.flags`),
checks (`check`) and the table in docs/flags.md are made from it, so they can't drift apart. The engine has options
(`EngineConfig`), and so has a drafter, which takes its own behind its name: `--draft 'ngram?max_match=8'`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

_KEY = "jaxspec.option"


class ConfigError(ValueError):
    """A model config, engine option or combination of them that can't work. Names the option or key."""


@dataclass(frozen=True)
class Option:
    """The description of an option beside its name, type and default.

    `metavar` names its value in --help; None: it is on or off. `shown` is the default in words. `choices` are all
    allowed values, `aliases` other names for some; numbers are `least` or more, or strictly `between` two. `common`:
    most people set it. `several`: it is a tuple of texts. `hint` follows the error about a value that isn't allowed.
    """

    help: str
    metavar: str | None = None
    group: str = ""
    shown: str | None = None
    least: int | None = None
    between: tuple[float, float] | None = None
    choices: tuple[Any, ...] | None = None
    aliases: tuple[tuple[str, Any], ...] = ()
    common: bool = False
    several: bool = False
    hint: str = ""


def option(
    default: Any, help: str, metavar: str | None = None, *, aliases: Mapping[str, Any] = {}, **fields: Any
) -> Any:
    """A dataclass field that is an option. The arguments are `Option`'s."""
    described = Option(help, metavar, aliases=tuple(aliases.items()), **fields)
    return dataclasses.field(default=default, metadata={_KEY: described})


@cache
def options_of(cls: type) -> dict[str, tuple[type, Any, Option]]:
    """A dataclass's options in order, by name: the type of a given value, the default, and the description."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    found = {}
    for field in fields:
        if _KEY in field.metadata:
            default = field.default
            spec = field.metadata[_KEY]
            kind = _plain(typing.get_type_hints(cls)[field.name]) if default is None else type(default)
            found[field.name] = str if spec.several else kind, default, spec
    return found


def check(config: Any, spell: Any = lambda name: flag(name)) -> None:
    """Replace aliases in the options of a dataclass instance that was just made, and check each by itself.

    **Raises:** `ConfigError` with the option as `spell` writes its name, what was given, and what is allowed.
    """
    for name, (kind, default, spec) in options_of(type(config)).items():
        given = getattr(config, name)
        value = dict(spec.aliases).get(given, given) if isinstance(given, str) else as_python(given)
        if value is not given:
            object.__setattr__(config, name, value)  # the dataclass is frozen
        if value is None and default is None:
            continue
        if (allowed := _refused(value, kind, spec)) is not None:
            raise ConfigError(f"{spell(name)} {allowed}, got {given!r}" + (spec.hint and f"; {spec.hint}"))


def as_python(value: Any) -> Any:
    """A number or an array, of NumPy or jax, and a path as Python's numbers, lists and texts; all else as it is."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _refused(value: Any, kind: type, spec: Option) -> str | None:
    """Describe the allowed values if this isn't one; None if it is."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if spec.several:
        whole = isinstance(value, tuple) and all(isinstance(each, str) and each for each in value)
        return None if whole else "must be a list of texts that aren't empty"
    if spec.choices is not None:
        others = [name for name, meant in spec.aliases if meant not in spec.choices]  # of the default, which is None
        return None if value in spec.choices else f"must be one of {', '.join(map(str, (*others, *spec.choices)))}"
    if kind is bool:
        return None if isinstance(value, bool) else "must be true or false"
    if kind is int:
        low = -math.inf if spec.least is None else spec.least
        bound = "" if spec.least is None else f" of at least {spec.least}"
        return None if number and isinstance(value, int) and value >= low else f"must be an integer{bound}"
    if kind is float:
        low, high = spec.between or (-math.inf, math.inf)
        return None if number and low < value < high else f"must be between {low:g} and {high:g}"
    return None if isinstance(value, str) and value else "must be a name or a path"


def from_query(cls: type, query: str, of: str) -> dict[str, Any]:
    """Values of a dataclass's options from `name=value&name=value`, which followed `of` and a question mark.

    **Raises:** `ConfigError` for an unknown option, with those there are, or a value of another type.
    """
    known, values = options_of(cls), {}
    for pair in filter(None, query.split("&")):
        name, equals, text = pair.partition("=")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            have = "; ".join(f"{each}: {spec.help}" for each, (_, _, spec) in known.items()) or "none"
            raise ConfigError(f"--draft {of} has no option {name!r}; {hint}it has {have}")
        kind = known[name][0]
        try:
            values[name] = _read(kind, text, bool(equals))
        except ValueError as error:
            what = {int: "an integer", float: "a number", bool: "true or false"}.get(kind, "a value")
            raise ConfigError(f"--draft {of}: option {name} takes {what}, got {text!r}") from error
    return values


def _read(kind: type, text: str, given: bool) -> Any:
    if kind is not bool:
        return kind(text)
    if text in ("true", "1") or not given:
        return True
    if text in ("false", "0"):
        return False
    raise ValueError(text)


def flag(name: str) -> str:
    """The command-line spelling of an engine option: `page_size` -> `--page-size`."""
    return "--" + name.replace("_", "-")


def _plain(hint: Any) -> type:
    """`int | None` -> int: None is a default, not something to type."""
    if isinstance(hint, types.UnionType):
        (hint,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
    return hint
