"""JSON schemas as parsers and grammars read them alike: references followed, `allOf` merged, a value's types.

Invariant: every function here takes any JSON value in a schema's place and returns. Unknown types and keywords, broken
references and circles of them are read as no constraint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from jaxspec.config.request import MAX_NESTING
from jaxspec.structured.texts import matches

ANY = frozenset({"null", "boolean", "number", "string", "array", "object"})  # a number may be an integer
NEVER = {"not": {}}  # what the schema `false` says
EXCEPT = "x-except"  # a keyword of our own: values that are forbidden

# Names of types that schemas have though JSON Schema doesn't; vLLM knows these too.
NAMES = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("num", "float", "float32", "float64", "double"), "number"),
    **dict.fromkeys(("bool", "binary"), "boolean"),
    **dict.fromkeys(("dict", "map"), "object"),
    **dict.fromkeys(("list", "arr", "tuple"), "array"),
}
_PYTHON = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
OF_OBJECTS = frozenset(
    {
        *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames"),
        *("required", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
    }
)
OF_ARRAYS = frozenset(
    {
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "minContains", "maxContains"),
        *("minItems", "maxItems", "uniqueItems"),
    }
)
OF_STRINGS = frozenset({"minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType"})
OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
IMPLIED = {"object": OF_OBJECTS, "array": OF_ARRAYS, "string": OF_STRINGS, "number": OF_NUMBERS}
ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "components", "nullable"),
    }
)
_OLD = tuple(f"http://json-schema.org/draft-0{i}" for i in (3, 4, 6, 7))  # in which nothing counts beside $ref
UNEVALUATED = frozenset({"unevaluatedProperties", "unevaluatedItems"})
# Keywords that mean something only together
_GROUPS = (
    ("properties", "patternProperties", "additionalProperties"),
    ("prefixItems", "items", "additionalItems"),
    ("contains", "minContains", "maxContains"),
    ("if", "then", "else"),
    ("minimum", "exclusiveMinimum"),
    ("maximum", "exclusiveMaximum"),
)


def refer(reference: Any, root: Any) -> Any:
    """The schema within `root` that a `$ref` names, by a path or an `$anchor`; None if there is none.

    Names may have brackets and other characters that URIs don't, as they are or escaped.
    """
    if not isinstance(reference, str):
        return None
    base, _, fragment = reference.partition("#")
    if base and not (isinstance(root, Mapping) and base in (root.get("$id"), root.get("id"))):
        return None
    if fragment and not fragment.startswith("/"):
        return next((each for each in _all(root) if each.get("$anchor") == unquote(fragment)), None)
    found = root
    for part in fragment.split("/")[1:]:
        names = [name.replace("~1", "/").replace("~0", "~") for name in (unquote(part), part)]
        if isinstance(found, Mapping):
            found = next((found[name] for name in names if name in found), None)
        elif isinstance(found, list) and part.isdecimal() and len(part) < 9 and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found


def resolve(schema: Any, root: Any) -> dict[str, Any]:
    """The schema as one object: references within `root` followed and `allOf` merged, at this level alone.

    It means what the schema means. What can't be merged stays, in an `allOf`; so does a reference that leads nowhere.
    A circle of references is dropped.
    """
    merged: dict[str, Any] = {}
    parts = [part for part in _conjuncts(schema, root, set()) if part]
    alone = sum(bool(part.keys() - ANNOTATIONS) for part in parts) == 1
    for i, part in enumerate(parts):
        own = i == 0 and isinstance(schema, Mapping) and schema.keys() & UNEVALUATED
        if part.keys() & UNEVALUATED and not (own or alone):
            merged["allOf"] = [*merged.get("allOf", ()), part]  # where it stands, it sees what `part` has and no more
            part = {key: value for key, value in part.items() if key not in UNEVALUATED}
        _merge(merged, part)
    return merged


def types(schema: Any, root: Any, implied: bool = True) -> frozenset[str]:
    """JSON types that a value may have, of `ANY` and "integer"; the latter only where no other number may stand.

    `implied`: a schema that has keywords of one type alone, such as `properties`, is of that type. Options that are
    references in a circle say nothing.
    """
    return _types(schema, root, implied, {}, 0)


def _types(schema: Any, root: Any, implied: bool, known: dict[int, frozenset[str]], depth: int) -> frozenset[str]:
    if (place := id(schema)) in known or depth > MAX_NESTING:
        return known.get(place, ANY)
    known[place] = ANY
    whole = resolve(schema, root)
    found = _own_types(whole, implied)
    for keyword in ("anyOf", "oneOf"):
        for options in _groups(whole, keyword):
            found = meet(found, join(*(_types(option, root, implied, known, depth + 1) for option in options)))
    if whole.get("nullable") is True and found and not ("enum" in whole or "const" in whole):
        found |= {"null"}
    known[place] = found
    return found


def _groups(whole: Mapping[str, Any], keyword: str) -> Iterator[list[Any]]:
    """Every list of options under a keyword, those that `resolve` couldn't merge included."""
    for part in (whole, *whole.get("allOf", ())):
        if isinstance(options := part.get(keyword), list) and options:
            yield options


def _own_types(whole: Mapping[str, Any], implied: bool) -> frozenset[str]:
    """Types by `type`, `enum` and `const`, or else by the keywords that a schema has."""
    if whole.get("not") in ({}, True):
        return frozenset()
    found = ANY
    for part in (whole, *whole.get("allOf", ())):
        names = [NAMES.get(name.strip().lower(), name) for name in _list(part.get("type")) if isinstance(name, str)]
        if listed := frozenset(names) & (ANY | {"integer"}):
            found = meet(found, join(listed))
        if isinstance(part.get("enum"), list):
            found = meet(found, join(map(type_of, part["enum"])))
        if "const" in part:
            found = meet(found, frozenset({type_of(part["const"])}))
    kinds = [kind for kind, keywords in IMPLIED.items() if keywords & whole.keys()]
    return frozenset(kinds) if implied and found == ANY and len(kinds) == 1 else found


def members(schema: Any, root: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Schemas of an object's members: by their name, by a pattern that it matches, and of all others (False: none).
    A member of several options of a union is of any of their schemas."""
    return _members(schema, root, set())


def _members(schema: Any, root: Any, seen: set[int]) -> tuple[dict[str, Any], dict[str, Any], Any]:
    seen.add(id(schema))
    whole = resolve(schema, root)
    own: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    options: tuple[dict[str, list[Any]], dict[str, list[Any]]] = ({}, {})
    others: Any = False
    for part in (whole, *whole.get("allOf", ())):
        for key, found in zip(("properties", "patternProperties"), own, strict=True):
            for name, each in part[key].items() if isinstance(part.get(key), Mapping) else ():
                found[name] = both(found.get(name, True), each)
        others = others or part.get("additionalProperties", False)
        for option in (each for key in ("anyOf", "oneOf", "then", "else") for each in _list(part.get(key, []))):
            if id(option) not in seen:
                *inner, open_to = _members(option, root, seen)
                others = others or open_to
                for found, more in zip(options, inner, strict=True):
                    for name, each in more.items():
                        found.setdefault(name, []).append(each)
    for found, more in zip(own, options, strict=True):
        for name, each in more.items():
            found[name] = both(found.get(name, True), each[0] if len(each) == 1 else {"anyOf": each})
    return *own, others


def member(named: Mapping[str, Any], patterns: Mapping[str, Any], others: Any, name: str) -> Any:
    """The schema of an object's member, by what `members` gives."""
    found = [named[name]] if name in named else []
    found += [each for pattern, each in patterns.items() if matches(pattern, name) is not False]
    return {"allOf": found} if len(found) > 1 else found[0] if found else others


def type_of(value: Any) -> str:
    """The JSON type of a value; a number without a fraction is an integer."""
    return "integer" if isinstance(value, float) and value.is_integer() else _PYTHON.get(type(value), "null")


def join(*sets: Iterable[str]) -> frozenset[str]:
    """Types of either."""
    found = frozenset().union(*sets)
    return found - {"integer"} if "number" in found else found


def meet(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """Types of both: an integer is a number."""
    both = one & other
    return both | {"integer"} if {"integer", "number"} <= one | other and not both & {"number", "integer"} else both


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _all(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every object in a JSON value."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _conjuncts(schema: Any, root: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
    """Schemas that hold together, none with a reference or `allOf`. A schema counts once: again it says nothing."""
    waiting, old = [(schema, True)], isinstance(root, Mapping) and str(root.get("$schema")).startswith(_OLD)
    while waiting:
        schema, first = waiting.pop()
        if schema is False:
            yield NEVER
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        own = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        if own.get("nullable") is True and ("type" in own or not first):
            own |= {"type": [*_list(own["type"]), "null"]} if "type" in own else {}
            del own["nullable"]
        parts = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
        if old and "$ref" in schema:
            own, parts = {}, []
        if "$ref" in schema:
            if (target := refer(schema["$ref"], root)) is None:
                own["$ref"] = schema["$ref"]
            else:
                parts = [target, *parts]
        leads = next((key for key in schema if key in ("properties", "required", "$ref", "allOf")), None)
        later = leads in ("$ref", "allOf") and own.keys() & {"properties", "required"}
        if later and not own.keys() & {"$ref", *UNEVALUATED}:
            waiting.append((own, first))  # members come in the order in which the schema has them
        else:
            yield own
        waiting += [(part, False) for part in reversed(parts)]


def _merge(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Let `whole` hold what `part` says, too; what can't be written in one object goes into its `allOf`."""
    part, apart = dict(part), {}
    _merge_objects(whole, part)
    for group in _GROUPS:
        ours, theirs = ({key: each[key] for key in group if key in each} for each in (whole, part))
        if ours and theirs and ours != theirs:
            apart |= {key: part.pop(key) for key in theirs}
    for key, value in part.items():
        if key not in whole:
            whole[key] = value
        elif not same(whole[key], value) and key not in ANNOTATIONS:
            merged = _MERGE[key](whole[key], value) if key in _MERGE else None
            if merged is None:
                apart[key] = value
            elif merged == []:  # no type, or no value
                whole |= NEVER
            else:
                whole[key] = merged
    if apart:
        whole["allOf"] = [*whole.get("allOf", ()), apart]


def _merge_objects(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Merge the keywords of an object's members into `whole` and take them out of `part`, where that is exact: without
    patterns, or where both sides let other members be anything."""
    names, patterns, others = _GROUPS[0]
    sides = (whole, part)
    if not any(key in part for key in _GROUPS[0]) or not all(
        isinstance(each.get(key, {}), Mapping) for each in sides for key in (names, patterns)
    ):
        return
    free = all(each.get(others, True) in (True, {}) for each in sides)
    if not free and any(each.get(patterns) for each in sides):
        return
    ours, theirs = (each.get(names, {}) for each in sides)
    members = {}
    for name in (*ours, *(name for name in theirs if name not in ours)):
        wanted = [side.get(name, each.get(others, {})) for side, each in ((ours, whole), (theirs, part))]
        members[name] = both(*wanted)
    rest = both(whole.get(others, True), part.get(others, True))
    if names in whole or names in part:
        whole[names] = members
    if patterns in part:
        mine = whole.get(patterns, {})
        merged = {key: both(mine.get(key, True), value) for key, value in part[patterns].items()}
        whole[patterns] = {**mine, **merged}
    if others in whole or others in part:
        whole[others] = rest
    for key in _GROUPS[0]:
        part.pop(key, None)


def both(one: Any, other: Any) -> Any:
    if one in (True, {}) or same(one, other):
        return other
    if other in (True, {}):
        return one
    return False if one is False or other is False else {"allOf": [one, other]}


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal. Python's `True == 1` isn't JSON's."""
    return one is other or (one == other and json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))


def _types_of_both(one: Any, other: Any) -> Any:
    if not all(isinstance(name, str) and name in ANY | {"integer"} for each in (one, other) for name in _list(each)):
        return None
    both = sorted(meet(frozenset(_list(one)), frozenset(_list(other))))
    return both[0] if len(both) == 1 else both


def _enum_of_both(one: Any, other: Any) -> Any:
    if isinstance(one, list) and isinstance(other, list):
        return [value for value in one if any(same(value, each) for each in other)]
    return None


def _required_of_both(one: Any, other: Any) -> Any:
    return [*dict.fromkeys([*one, *other])] if _texts(one) and _texts(other) else None


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_MERGE = {
    "type": _types_of_both,
    "enum": _enum_of_both,
    "const": lambda one, other: [],  # of two that differ
    "required": _required_of_both,
    EXCEPT: lambda one, other: [*one, *other],
}
