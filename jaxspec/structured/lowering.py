"""Lower a JSON schema to the keywords that the grammar library takes, without changing what it allows.

Invariant: a lowered schema allows no value that the schema forbids, but for what `lower` names. Keywords that impose
nothing are left out, and what can't be enforced raises an error with its path: nothing is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxspec.structured.logic import Disjoint, negation, values
from jaxspec.structured.regex import of_ecma
from jaxspec.structured.schema import (
    ANNOTATIONS,
    ANY,
    EXCEPT,
    IMPLIED,
    NAMES,
    OF_ARRAYS,
    OF_NUMBERS,
    OF_OBJECTS,
    UNEVALUATED,
    both,
    meet,
    resolve,
    same,
    type_of,
    types,
)
from jaxspec.structured.texts import (
    FORMAT_PATTERNS,
    FORMATS,
    escape,
    looks_around,
    matches,
    other_texts,
    without_lookahead,
)

MAX_PARTS, MAX_OPTIONS = 20_000, 1000  # of a schema; and of its unions, where several are multiplied out
MAX_COUNT = 2**31  # more items, members or characters than any text has
MOST_INT, LEAST_INT = 2**63 - 1, -9223372036854774784  # the library's bounds of integers; the least is a float's
MOST_NUMBER = 10**17  # its bound of other numbers
MOST_DOUBLE, LEAST_NORMAL = 1.7976931348623157e308, 2.2250738585072014e-308
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_UNIONS = ("anyOf", "oneOf")
_CONDITIONS = ("dependentRequired", "dependentSchemas", "dependencies")
_EVERY = frozenset({"", "^", "$", ".*", "^.*", ".*$", r"[\s\S]*", r"^[\s\S]*", r"^[\s\S]*$"})  # patterns of any name
_LINES = frozenset({"^.*$", ".+", "^.+", "^.+$", ".", "^."})  # of any but those empty or of several lines
_SCALARS = frozenset({"type", "enum", "const", "pattern", "format", "minLength", "maxLength", *OF_NUMBERS})


class SchemaError(ValueError):
    """A schema that can't be enforced. The message has the path of the part at fault."""

    def __init__(self, path: str, why: str):
        super().__init__(f"at {path or '/'}: {why}")


def lower(root: Any, part: Any = None, *, strict: bool = False, arguments: bool = False) -> Any:
    """The schema as the grammar library takes it, or a `part` that refers to it. **Raises:** `SchemaError`.

    Two things are weaker than the schema unless `strict`, which refuses them: `oneOf` whose options may overlap allows
    what any of them does, and `uniqueItems` isn't enforced. `arguments`: these are a tool's arguments, whose objects
    have no further members unless the schema lets them, and whose keywords imply a type.
    """
    lowering = _Lowering(root, strict, arguments)
    lowered = lowering.lower(root if part is None else part, "")
    if lowered is False:
        raise SchemaError("", "the schema allows no value")
    lowered = {} if lowered is True else lowered
    return {**lowered, "$defs": lowering.definitions} if lowering.definitions else lowered


class _Lowering:
    """One schema's. Parts that refer or that several others form become `definitions`, known by their text. So circles
    of references end, those of merged parts included."""

    def __init__(self, root: Any, strict: bool, arguments: bool):
        self.root, self.strict, self.arguments = root, strict, arguments
        self.definitions: dict[str, Any] = {}
        self._known: dict[str, Any] = {}  # a part, lowered, by its text; a definition's name while it is made
        self._circular: set[str] = set()
        self._count = self._options = 0

    def lower(self, schema: Any, path: str) -> Any:
        """A part of the schema."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise SchemaError(path, f"a schema is an object, true or false, not {json.dumps(schema)[:60]}")
        self._count += 1
        if self._count > MAX_PARTS:
            raise SchemaError(path, f"the schema has more than {MAX_PARTS} parts")
        if not schema.keys() & {"$ref", "allOf", *_UNIONS}:
            return self._merged(schema, path)
        text = json.dumps({key: value for key, value in schema.items() if key not in ANNOTATIONS or key == "nullable"})
        if isinstance(known := self._known.get(text), str):
            self._circular.add(known)
            return {"$ref": f"#/$defs/{known}"}
        if known is not None:
            return known
        name = self._known[text] = f"d{len(self._known)}"
        lowered = self._merged(schema, path)
        if name in self._circular or not (isinstance(lowered, bool) or lowered.keys() <= _SCALARS):
            if lowered == {"$ref": f"#/$defs/{name}"}:
                raise SchemaError(path, "the reference leads to itself")
            self.definitions[name] = lowered
            lowered = {"$ref": f"#/$defs/{name}"}
        self._known[text] = lowered
        return lowered

    def _merged(self, schema: Mapping[str, Any], path: str) -> Any:
        whole = resolve(schema, self.root)
        nullable = whole.get("nullable") is True
        whole = {key: value for key, value in whole.items() if key not in ANNOTATIONS}
        if whole.get("not") in (True, {}):
            return False
        if nullable and values(whole) is None and whole:
            return {"anyOf": [self.lower(whole, path), {"type": "null"}]}
        for part in (whole, *whole.get("allOf", ())):
            for key in _REFERENCES:
                if key in part:
                    if key != "$ref":
                        raise SchemaError(path, f"{key} can't be followed; write $ref")
                    why = "is no path and no $anchor in this schema, and the server does not fetch others"
                    raise SchemaError(path, f"$ref {part[key]!r} {why}")
        if any(whole.get(key, True) not in (True, {}) for key in UNEVALUATED):
            others = ("not", "contains") + ("if",) * whole.keys().isdisjoint({"then", "else"})
            if unseen := [key for key in others if key in whole]:
                raise SchemaError(path, f"unevaluated members beside {unseen[0]} can't be enforced")
            if "unevaluatedItems" in whole and any(OF_ARRAYS & part.keys() for part in whole.get("allOf", ())):
                raise SchemaError(path, "unevaluatedItems beside several lists of items can't be enforced")
        for keyword, options, rest in self._unions(whole, path):
            return self._union(keyword, options, rest, path)
        return self._plain(whole, path)

    def _unions(self, whole: Mapping[str, Any], path: str) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
        """Unions of a merged schema, each with what holds beside it. Conditions are unions, too."""
        apart = whole.get("allOf", [])
        for i, part in enumerate((whole, *apart)):
            if i and part.keys() & UNEVALUATED:
                continue  # they see its unions
            for keyword in (*_UNIONS, *_CONDITIONS, "if"):
                if keyword not in part:
                    continue
                others = {key: value for key, value in part.items() if key != keyword}
                if keyword == "if":
                    options = self._condition(part, path)
                    others = {key: value for key, value in others.items() if key not in ("then", "else")}
                elif keyword in _UNIONS:
                    options = part[keyword]
                else:
                    options, left = self._dependency(keyword, part[keyword], path)
                    others |= {keyword: left} if left else {}
                if not isinstance(options, list):
                    raise SchemaError(path, f"{keyword} must be a list of schemas")
                yield keyword, options, {**whole, "allOf": [*apart[: i - 1], others, *apart[i:]]} if i else others

    def _dependency(self, keyword: str, given: Any, path: str) -> tuple[list[Any], dict[str, Any]]:
        """The first condition on a member, as a union, and the others."""
        if not isinstance(given, Mapping):
            raise SchemaError(path, f"{keyword} must be an object")
        if not given:
            return [True], {}
        (name, wanted), *left = given.items()
        wanted = {"required": wanted} if isinstance(wanted, list) else wanted
        return [{"properties": {name: False}}, {"required": [name], "allOf": [wanted]}], dict(left)

    def _condition(self, part: Mapping[str, Any], path: str) -> list[Any]:
        if not part.keys() & {"then", "else"}:
            return [True]
        try:
            other = negation(part["if"], self.root)
        except ValueError as error:
            raise SchemaError(path, f"if with {error} can't be enforced") from None
        return [{"allOf": [part["if"], part.get("then", True)]}, {"allOf": [other, part.get("else", True)]}]

    def _union(self, keyword: str, options: list[Any], rest: dict[str, Any], path: str) -> Any:
        rest = {key: value for key, value in rest.items() if key != "allOf" or value}
        self._options += len(options) if rest else 0
        if self._options > MAX_OPTIONS:
            raise SchemaError(path, f"its unions have more than {MAX_OPTIONS} options, multiplied out")
        each = [{**rest, "allOf": [*rest.get("allOf", ()), option]} if rest else option for option in options]
        if keyword == "oneOf" and self.strict and not Disjoint(self.root, self.arguments).all(each):
            raise SchemaError(path, "oneOf has options that may overlap, which strict: true can't allow; use anyOf")
        lowered = [self.lower(option, f"{path}/{keyword}/{i}") for i, option in enumerate(each)]
        lowered = [option for option in lowered if option is not False]
        if True in lowered:
            return True
        return False if not lowered else lowered[0] if len(lowered) == 1 else {"anyOf": lowered}

    def _plain(self, whole: dict[str, Any], path: str, beside: bool = False) -> Any:
        """A schema without unions."""
        if "not" in whole:
            others = {key: value for key, value in whole.items() if key != "not"}
            try:
                other = negation(whole["not"], self.root)
            except ValueError as error:
                raise SchemaError(path, f"not with {error} can't be enforced") from None
            return self.lower({"allOf": [others, other]}, path)
        kinds = self._kinds(whole, path)
        lowered: dict[str, Any] = {"type": kinds[0] if len(kinds) == 1 else kinds} if kinds else {}
        allowed = set(kinds or ANY)
        if (listed := whole.get("enum")) is not None and not isinstance(listed, list):
            raise SchemaError(path, "enum must be a list")
        if (given := values(whole)) is not None:
            given = [each for each in given if listed is None or any(same(each, other) for other in listed)]
            given = [each for each in given if meet(frozenset(allowed), frozenset({type_of(each)}))]
            if not given:
                return False
            lowered |= {"const": given[0]} if "const" in whole else {"enum": given}
        if "string" in allowed:
            lowered |= self._string(whole, path)
        if allowed & {"number", "integer"}:
            lowered |= _numbers(whole, "number" not in allowed, path)
        if "array" in allowed and OF_ARRAYS & whole.keys():
            lowered |= self._array(whole, path)
        if "object" in allowed and (OF_OBJECTS & whole.keys() or kinds == ["object"]):
            found = self._object(whole, path, beside)
            if _impossible(found):
                kinds = sorted(allowed - {"object"})
                if not kinds:
                    return False
                lowered["type"] = kinds
            else:
                lowered |= found
        if apart := whole.get("allOf"):
            lowered["allOf"] = [*lowered.get("allOf", ()), *(self._apart(part, path) for part in apart)]
        return _without(lowered, whole[EXCEPT], path) if EXCEPT in whole else lowered

    def _apart(self, part: dict[str, Any], path: str) -> Any:
        """Lower what couldn't be merged with the rest, which says whether an object is closed."""
        return self.lower(part, path) if part.keys() & {*_UNIONS} else self._plain(part, path, beside=True)

    def _kinds(self, whole: Mapping[str, Any], path: str) -> list[str]:
        """The types that a schema names, or that a tool's implies; none if it may be of any."""
        if "type" not in whole:
            implied = [kind for kind, keywords in IMPLIED.items() if keywords & whole.keys()]
            return implied if self.arguments and len(implied) == 1 and values(whole) is None else []
        given = whole["type"] if isinstance(whole["type"], list) else [whole["type"]]
        names = [NAMES.get(str(name).strip().lower(), name) if self.arguments else name for name in given]
        if bad := [name for name in names if not isinstance(name, str) or name not in ANY | {"integer"}]:
            raise SchemaError(path, f"{bad[0]!r} isn't a type; JSON has {', '.join(sorted(ANY))} and integer")
        if not names:
            raise SchemaError(path, "type must name at least one type")
        return [*dict.fromkeys(names)]

    def _string(self, whole: Mapping[str, Any], path: str) -> dict[str, Any]:
        found = _counts(whole, path, "minLength", "maxLength")
        if isinstance(pattern := whole.get("pattern", ""), str):
            pattern, *ahead = without_lookahead(pattern)
            found |= {"pattern": of_ecma(pattern)} if pattern else {}
            found |= {"allOf": [{"type": "string", "pattern": of_ecma(each)} for each in ahead]} if ahead else {}
        else:
            raise SchemaError(path, f"pattern must be a string, not {json.dumps(pattern)[:60]}")
        if looks_around(found.get("pattern", "")):
            raise SchemaError(path, f"the pattern {pattern[:60]!r} looks ahead or behind, which can't be enforced")
        if (form := whole.get("format")) in FORMATS:  # others say nothing, by JSON Schema itself
            if form not in FORMAT_PATTERNS:
                raise SchemaError(path, f"the format {form} can't be enforced; {', '.join(FORMAT_PATTERNS)} can")
            found["format"] = form
        return found

    def _array(self, whole: Mapping[str, Any], path: str) -> dict[str, Any]:
        found = _counts(whole, path, "minItems", "maxItems")
        word, after = ("items", "additionalItems") if isinstance(whole.get("items"), list) else ("prefixItems", "items")
        first, others = whole.get(word, []), whole.get(after, whole.get("unevaluatedItems", True))
        if not isinstance(first, list):
            raise SchemaError(path, f"{word} must be a list of schemas")
        if "contains" in whole and not (whole.get("minContains") == 0 and "maxContains" not in whole):
            if whole["contains"] not in (True, {}) and not (not first and same(whole["contains"], others)):
                raise SchemaError(path, "contains can't be enforced")
            found["minItems"] = max(found.get("minItems", 0), whole.get("minContains", 1))
            if "maxContains" in whole:
                found["maxItems"] = min(found.get("maxItems", MAX_COUNT), whole["maxContains"])
        if whole.get("uniqueItems", False) is not False and found.get("maxItems", 2) > 1 and self.strict:
            raise SchemaError(path, "uniqueItems can't be enforced, which strict: true asks for")
        if first:
            found["prefixItems"] = [self.lower(each, f"{path}/{word}/{i}") for i, each in enumerate(first)]
        if others not in (True, {}):
            found["items"] = self.lower(others, f"{path}/{after}")
        return found

    def _object(self, whole: Mapping[str, Any], path: str, beside: bool) -> dict[str, Any]:
        found = _counts(whole, path, "minProperties", "maxProperties")
        members, patterns = (_mapping(whole, key, path) for key in ("properties", "patternProperties"))
        required = _names(whole.get("required", []), path)
        required += [key for key, each in members.items() if isinstance(each, Mapping) and each.get("required") is True]
        others = whole.get("additionalProperties", whole.get("unevaluatedProperties"))
        unsaid = others is None and (self.strict or "properties" in whole)
        opens = beside or patterns or "propertyNames" in whole
        if self.arguments and not opens and (unsaid or (self.strict and others in (True, {}))):
            members = {**members, **{name: True for name in required if name not in members}}
            others = False
        others = True if others is None else others
        name = self._name(whole.get("propertyNames", True), f"{path}/propertyNames")
        if name is not True:
            if patterns and name is not False:
                raise SchemaError(path, "propertyNames beside patternProperties can't be enforced")
            members = {key: each if name and matches(name, key) else False for key, each in members.items()}
            patterns = {name: others} if name and others is not False else {}
            others = False
        for every in [key for key in patterns if key in _EVERY or (key in _LINES and others in (True, {}))]:
            others = patterns[every]
            patterns = {key: both(each, others) for key, each in patterns.items() if key != every}
            members = {key: both(each, others) for key, each in members.items()}
        if members:
            found["properties"] = {key: self.lower(each, f"{path}/properties/{key}") for key, each in members.items()}
        alike: dict[str, list[str]] = {}
        for key, each in patterns.items():
            lowered = self.lower(each, f"{path}/patternProperties/{key}")
            if others not in (True, {}) or lowered not in (True, {}):
                alike.setdefault(json.dumps(lowered), []).append(of_ecma(key))
        if alike:  # one pattern for each schema, since the library takes none that have names in common
            joined = lambda keys: keys[0] if len(keys) == 1 else "|".join(f"(?:{key})" for key in keys)  # noqa: E731
            found["patternProperties"] = {joined(keys): json.loads(lowered) for lowered, keys in alike.items()}
        if others not in (True, {}):
            found["additionalProperties"] = self.lower(others, f"{path}/additionalProperties")
        if required:
            found["required"] = [*dict.fromkeys(required)]
        if found.get("minProperties", 1) <= len(found.get("required", ())):
            found.pop("minProperties", None)
        if others is False and not patterns and found.get("maxProperties", 0) >= len(members):
            found.pop("maxProperties", None)
        return found

    def _name(self, schema: Any, path: str) -> str | bool:
        """The names that `propertyNames` allows, as a regular expression; True if all, False if none."""
        whole = {key: value for key, value in resolve(schema, self.root).items() if key not in ANNOTATIONS}
        if not meet(types(whole, self.root, False), frozenset({"string"})):
            return False
        if (listed := values(whole)) is not None:
            return f"^(?:{'|'.join(escape(value) for value in listed if isinstance(value, str))})$"
        rest = {key: value for key, value in whole.items() if key != "type"}
        if len(rest) == 1 and (keyword := next(iter(rest))) in _UNIONS and isinstance(rest[keyword], list):
            found = [self._name(each, f"{path}/{keyword}/{i}") for i, each in enumerate(rest[keyword])]
            return True if True in found else "|".join(f"(?:{each})" for each in found if each) or False
        text = self._string(rest, path)
        if rest.keys() - {"pattern", "format", "minLength", "maxLength"} or len(text.keys() - {"format"}) > 1 + (
            "pattern" not in text
        ):
            raise SchemaError(path, f"names with {' and '.join(rest)} can't be enforced")
        if "pattern" in text or not text:
            return text.get("pattern", True)
        if "format" in text:
            if text["format"] not in FORMAT_PATTERNS:
                raise SchemaError(path, f"names of the format {text['format']} can't be enforced")
            return FORMAT_PATTERNS[text["format"]]
        return f"^[\\s\\S]{{{text.get('minLength', 0)},{text.get('maxLength', '')}}}$"


def _impossible(found: Mapping[str, Any]) -> bool:
    """Whether a lowered object can't have a member that it must."""
    members = found.get("properties", {})
    others = found.get("additionalProperties") is not False or "patternProperties" in found
    return any(members.get(name, others) is False for name in found.get("required", ()))


def _mapping(whole: Mapping[str, Any], key: str, path: str) -> Mapping[str, Any]:
    if not isinstance(found := whole.get(key, {}), Mapping):
        raise SchemaError(path, f"{key} must be an object of schemas")
    return found


def _names(given: Any, path: str) -> list[str]:
    if isinstance(given, bool):  # draft 3's, which the object around has read
        return []
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise SchemaError(path, "required must be a list of names")
    return [*given]


def _counts(whole: Mapping[str, Any], path: str, least: str, most: str) -> dict[str, Any]:
    """Counts as integers, without those that impose nothing."""
    found = {}
    for key in (least, most):
        count = whole.get(key, 0 if key == least else MAX_COUNT)
        if isinstance(count, bool) or not isinstance(count, int | float) or count < 0 or count != int(count):
            raise SchemaError(path, f"{key} must be a whole number of at least 0, not {json.dumps(count)[:60]}")
        if (count > 0) if key == least else (count < MAX_COUNT):
            found[key] = int(count)
    return found


def _numbers(whole: Mapping[str, Any], integer: bool, path: str) -> dict[str, Any]:
    """Bounds within what the library takes, and without those that impose nothing."""
    found: dict[str, Any] = {}
    for sign, bound in ((-1, "minimum"), (1, "maximum")):
        exclusive = f"exclusive{bound.capitalize()}"
        for key in (bound, exclusive):
            value = whole.get(key)
            if value is None or isinstance(value, bool):  # draft 4's exclusive bounds are true or false
                continue
            if not isinstance(value, int | float):
                raise SchemaError(path, f"{key} must be a number, not {json.dumps(value)[:60]}")
            limit = (LEAST_INT if sign < 0 else MOST_INT) if integer else sign * MOST_NUMBER
            if sign * value >= MOST_DOUBLE:
                continue
            if sign * value >= sign * limit:
                found[bound] = limit
            elif 0 < abs(value) <= LEAST_NORMAL:
                found[bound if sign * value > 0 else exclusive] = 0
            else:
                found[exclusive if whole.get(exclusive) is True else key] = value
    if integer and found.get("minimum", 0) >= MOST_NUMBER:
        found.setdefault("maximum", MOST_INT)
    step = whole.get("multipleOf")
    return found if step is None or (integer and step == 1) else {**found, "multipleOf": step}


def _without(lowered: dict[str, Any], forbidden: list[Any], path: str) -> Any:
    """A lowered schema without some values."""
    if (listed := values(lowered)) is not None:
        listed = [value for value in listed if not any(same(value, each) for each in forbidden)]
        lowered = {key: value for key, value in lowered.items() if key != "const"}
        return {**lowered, "enum": listed} if listed else False
    given = lowered.get("type", sorted(ANY))
    kinds = [given] if isinstance(given, str) else given
    forbidden = [value for value in forbidden if meet(frozenset(kinds), frozenset({type_of(value)}))]
    if not forbidden:
        return lowered
    kinds = [kind for kind in kinds if not (kind == "null" and None in forbidden)]
    texts = [value for value in forbidden if isinstance(value, str)]
    if kinds == ["boolean"]:
        return _without({"enum": [False, True]}, forbidden, path)
    if len(texts) + (None in forbidden) < len(forbidden):
        raise SchemaError(path, f"a value other than {json.dumps(forbidden)[:60]} can't be enforced")
    beside = {"allOf": [*lowered.get("allOf", []), {"type": kinds, "pattern": other_texts(texts)}]} if texts else {}
    return {**lowered, "type": kinds, **beside} if kinds else False
