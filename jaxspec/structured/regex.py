r"""Regular expressions as JSON Schema reads them, in Rust's syntax.

Invariant: `\d`, `\D`, `\w` and `\W` are ASCII's, wherever they stand. Rust's own are Unicode's, so that a model could
write the digits of any script. `\s` is any white space in both. A schema's `pattern` is ECMAScript's, in which classes
have no brackets or set operations within, any sign may be escaped, and a brace that counts nothing is itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

ASCII = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
JSON_SPACE = ASCII | {r"\s": r"[ \t\r\n]"}  # between the parts of a JSON text no other white space may stand

_OPENS = r"(?P<opens>\[\^?(?:-+|\])?)"  # a hyphen or a bracket that comes first is a character
_CLASS = r"\\[dDwWsS]"
_OUTSIDE = re.compile(rf"{_OPENS}|\\.|.", re.DOTALL)
_INSIDE = re.compile(
    r"\[:\^?\w+:\]"
    rf"|{_OPENS}|(?P<closes>\])|&&|--|~~"
    rf"|(?P<apart>{_CLASS}(?=-[^\]-])|(?:\\.|.)(?=-{_CLASS}))-"  # no range: an end of it would be a class
    r"|(?:\\.|.)-(?![\]-])(?:\\.|.)"
    r"|\\.|.",
    re.DOTALL,
)


def with_classes(regex: str, classes: Mapping[str, str] = ASCII) -> str:
    r"""Write out `classes` in an expression. A hyphen beside a class is itself: `[\w-.]` has three parts."""
    parts, depth, at = [], 0, 0
    while at < len(regex):
        found = (_INSIDE if depth else _OUTSIDE).match(regex, at)
        at, part, named = found.end(), found.group(), found.groupdict()
        depth += bool(named["opens"]) - bool(named.get("closes"))
        apart = named.get("apart")
        parts.append(classes.get(part, part) if apart is None else classes.get(apart, apart) + r"\-")
    return "".join(parts)


_SIGN = r"(?:\\c[A-Za-z]|\\u\{\w+\}|\\u\w{4}|\\x\w{2}|\\[^dDwWsSpPcux]|[^\\\]])"
_ECMA = {
    False: re.compile(r"(?P<opens>\[\^?\]?)|\{[0-9,]+\}|\\c[A-Za-z]|\\[pPux]\{[^}]*\}|\\.|.", re.DOTALL),
    True: re.compile(
        rf"(?P<closes>\])|\[:\^?\w+:\]|(?P<least>{_SIGN})-(?P<most>{_SIGN})|\\[pP]\{{[^}}]*\}}|{_SIGN}|\\.|.", re.DOTALL
    ),
}  # outside and inside of a class


def of_ecma(pattern: str) -> str:
    """A schema's `pattern` in Rust's syntax."""
    parts, inside, at = [], False, 0
    while at < len(pattern):
        found = _ECMA[inside].match(pattern, at)
        at, named = found.end(), found.groupdict()
        if named.get("opens") or named.get("closes"):
            parts.append(found[0])
            inside = not inside
        elif named.get("least"):
            parts.append(f"{_of_sign(named['least'], True)}-{_of_sign(named['most'], True)}")
        else:
            parts.append(_of_sign(found[0], inside))
    return "".join(parts)


def _of_sign(sign: str, inside: bool) -> str:
    if len(sign) == 1:
        return f"\\{sign}" if sign in ("[&~-" if inside else "{") else sign
    if sign.startswith(r"\c") and len(sign) == 3:
        return rf"\x{ord(sign[2]) % 32:02x}"
    if sign == r"\0" or (inside and sign == r"\b"):
        return r"\x00" if sign == r"\0" else r"\x08"
    return sign[1] if re.fullmatch(r"\\[^A-Za-z0-9\\.+*?()|\[\]{}^$#&\-~]", sign) else sign
