"""Logic of JSON schemas: whether two exclude each other, and a schema of the values that one forbids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxspec.structured.schema import ANNOTATIONS, ANY, EXCEPT, NEVER, join, meet, resolve, same, type_of, types
from jaxspec.structured.texts import matches

MAX_COMPARED = 20_000  # pairs of schemas that are looked at to tell whether two are disjoint
MAX_DEPTH = 8


class Disjoint:
    """Tells whether schemas within `root` exclude each other, for sure.

    `closed`: objects that name their members have no others unless they say so, and keywords imply a type.
    """

    def __init__(self, root: Any, closed: bool):
        self._root, self._closed, self._left = root, closed, MAX_COMPARED

    def all(self, schemas: Sequence[Any]) -> bool:
        """Whether any two of the schemas exclude each other."""
        return all(self._two(one, other, 0) for i, one in enumerate(schemas) for other in schemas[:i])

    def _two(self, one: Any, other: Any, depth: int) -> bool:
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            return False
        common = meet(*(types(each, self._root, self._closed) for each in (one, other)))
        if not common:
            return True
        one, other = resolve(one, self._root), resolve(other, self._root)
        for this, that in ((one, other), (other, one)):
            if (listed := values(this)) is not None:
                return not any(self._may(value, that) for value in listed)
        for this, that in ((one, other), (other, one)):
            for word in ("anyOf", "oneOf"):
                options = this.get(word)
                if isinstance(options, list) and all(self._two(option, that, depth + 1) for option in options):
                    return True
        if common == {"object"}:
            names = dict.fromkeys([*_required(one), *_required(other)])
            return any(self._two(self._member(one, name), self._member(other, name), depth + 1) for name in names)
        return common <= {"integer", "number"} and (_below(one, other) or _below(other, one))

    def _member(self, schema: Mapping[str, Any], name: str) -> Any:
        """The schema of a member of an object, as far as it is sure."""
        members = schema.get("properties")
        if isinstance(members, Mapping) and name in members:
            return members[name]
        if schema.get("patternProperties") or "propertyNames" in schema:
            return True
        closed = not (self._closed and "properties" in schema)
        return schema.get("additionalProperties", schema.get("unevaluatedProperties", closed))

    def _may(self, value: Any, schema: Mapping[str, Any]) -> bool:
        """Whether a schema may allow a value; False is sure."""
        if not meet(types(schema, self._root, self._closed), frozenset({type_of(value)})):
            return False
        if (listed := values(schema)) is not None:
            return any(same(value, each) for each in listed)
        if isinstance(value, str):
            least, most = schema.get("minLength", 0), schema.get("maxLength", len(value))
            if isinstance(least, int) and isinstance(most, int) and not least <= len(value) <= most:
                return False
            return matches(schema.get("pattern"), value) is not False
        return True


def values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists, of which it allows no other; None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _required(schema: Mapping[str, Any]) -> Iterator[str]:
    names = schema.get("required")
    yield from (name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def _below(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether one schema's numbers are all less than another's."""
    most = [(one[key], key) for key in ("maximum", "exclusiveMaximum") if _is_number(one.get(key))]
    least = [(other[key], key) for key in ("minimum", "exclusiveMinimum") if _is_number(other.get(key))]
    return any(
        high < low or (high == low and "exclusive" in above + below) for high, above in most for low, below in least
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def negation(schema: Any, root: Any, depth: int = 0) -> Any:
    """A schema of all values that `schema` forbids. **Raises:** `ValueError` naming a keyword for which it has none."""
    if schema is True or depth > MAX_DEPTH:
        return False
    if schema is False:
        return True
    whole = {key: value for key, value in resolve(schema, root).items() if key not in ANNOTATIONS}
    options: list[Any] = []
    for key, value in whole.items():
        if key == "type":
            options.append(_other_types(value))
        elif key in ("const", "enum"):
            options.append({EXCEPT: values(whole)})
        elif key == "required" and isinstance(value, list):
            options += [{"type": "object", "properties": {name: False}} for name in value]
        elif key == "properties" and isinstance(value, Mapping):
            options += [
                {"type": "object", "properties": {name: other}, "required": [name]}
                for name, each in value.items()
                if (other := negation(each, root, depth + 1)) is not False
            ]
        elif key in ("anyOf", "allOf") and isinstance(value, list):
            others = [negation(each, root, depth + 1) for each in value]
            options += others if key == "allOf" else [{"allOf": others}]
        elif key == "not":
            options.append(value)
        elif key in _OPPOSITE and _is_number(value):
            options.append(_OPPOSITE[key](value))
        else:
            raise ValueError(key)
    return {"anyOf": options} if options else False


def _other_types(given: Any) -> Any:
    names = join([name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)])
    if "integer" in names:
        raise ValueError("type integer")
    return {"type": sorted(ANY - names)} if ANY - names else NEVER


_OPPOSITE = {
    "minimum": lambda bound: {"type": "number", "exclusiveMaximum": bound},
    "maximum": lambda bound: {"type": "number", "exclusiveMinimum": bound},
    "exclusiveMinimum": lambda bound: {"type": "number", "maximum": bound},
    "exclusiveMaximum": lambda bound: {"type": "number", "minimum": bound},
    "minLength": lambda count: {"type": "string", "maxLength": count - 1} if count else NEVER,
    "maxLength": lambda count: {"type": "string", "minLength": count + 1},
    "minItems": lambda count: {"type": "array", "maxItems": count - 1} if count else NEVER,
    "maxItems": lambda count: {"type": "array", "minItems": count + 1},
}
