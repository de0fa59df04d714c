"""A regular expression's classes are those of a schema's `pattern`: ASCII's, wherever they stand."""

import pytest

from jaxspec import StructuredOutput
from jaxspec.structured.grammar import Grammars
from jaxspec.structured.regex import of_ecma, with_classes
from tests.server.fake import byte_tokenizer
from tests.structured.test_grammar import accepts
from tests.support.tiny import BYTE_VOCAB

CHARACTERS = "3az_-.d^][ \xa0é٣\u3000ſ"


@pytest.fixture(scope="module")
def grammars():
    return Grammars(byte_tokenizer(), BYTE_VOCAB, [258])


@pytest.mark.parametrize("regex", [
    r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"[\d.-]", r"[^\d]", r"[^\W\d]", r"[\w-.]", r"[a-z-\d]", r"[-\d]",
    r"[^-\d]", r"[\]\d]", r"[\d-]", r"[\D]", r"[[:alpha:]\d]", r"[]\d]",
    r"\w|-", r"[^\s\d]",
])  # fmt: skip
def test_a_regex_allows_what_a_pattern_allows(grammars, regex):
    alike, pattern = StructuredOutput(regex=regex), StructuredOutput(json={"type": "string", "pattern": f"^({regex})$"})
    allowed = [char for char in CHARACTERS if accepts(grammars, alike, char)]
    assert allowed == [char for char in CHARACTERS if accepts(grammars, pattern, f'"{char}"')]
    assert 0 < len(allowed) < len(CHARACTERS)


@pytest.mark.parametrize("regex,yes,no", [
    (r"\d{2}-\d", ["12-3"], ["١٢-٣", "1٢-3"]),
    (r"\\d", [r"\d"], ["3", r"\3"]),
    (r"\\\d", [r"\3"], [r"\d", r"\٣"]),
    (r"[\\d]", ["\\", "d"], ["3"]),
    (r"[.-\d]", [".", "-", "3"], ["/", "٣"]),
    (r"(?i)id\d", ["ID3"], ["id٣"]),
    (r"(?-u:\d)", ["3"], ["٣"]),
    (r"\p{Nd}", ["3", "٣"], ["a"]),
    (r"[\w&&[^\d]]", ["a"], ["3"]),
    (r"[\w--[a-z]]", ["3"], ["a"]),
])  # fmt: skip
def test_what_is_a_class_and_what_is_text(grammars, regex, yes, no):
    wanted = StructuredOutput(regex=regex)
    assert [accepts(grammars, wanted, text) for text in (*yes, *no)] == [True] * len(yes) + [False] * len(no)


@pytest.mark.parametrize("regex", ["", "é[a-z]{3}", "[", "\\", "[\\", "[a", "]", "[]", "[^", "[--a]", r"\p{L}[\x41]\s"])
def test_everything_else_stays(regex):
    assert with_classes(regex) == regex


@pytest.mark.parametrize("pattern,yes,no", [
    (r"^[^[\]]{2}$", "ab", "a["),
    (r"^[a&&b]{2}$", "a&", "ac"),
    (r"^[a-c--]{2}$", "c-", "d-"),
    (r"^[\w-.~~]+$", "a-.~", "a/"),
    (r"^[+--]$", ",", "."),
    (r"^[\b\cA\0\x41\u0042]$", "B", "b"),
    (r"^\<\/a\>\'\@\é\ $", "</a>'@é ", "/a'@é "),
    (r"^{{a{2}}}{$", "{{aa}}{", "{{a}}{"),
    (r"^\cJ?[\u{41}-\u{43}]\p{L}$", "Bé", "D1"),
])  # fmt: skip
def test_a_schema_s_pattern_is_ecmascripts(grammars, pattern, yes, no):
    wanted = StructuredOutput(json={"type": "string", "pattern": pattern})
    assert accepts(grammars, wanted, f'"{yes}"') and not accepts(grammars, wanted, f'"{no}"')
    assert of_ecma(of_ecma(pattern)) == of_ecma(pattern)


@pytest.mark.parametrize(
    "pattern", ["", "é[a-z]{3}", "[", "\\", "[\\", "[a", "]", "[]", "[^", r"\p{L}[\x41]\s", "(?<a>b{1,2})"]
)
def test_what_rust_reads_alike_stays(pattern):
    assert of_ecma(pattern) == pattern


def test_white_space_between_parts_of_json_is_jsons(grammars):
    wanted = StructuredOutput(json={"type": "array"}, whitespace_pattern=r"[\s]{0,2}")
    assert all(accepts(grammars, wanted, text) for text in ("[1]", "[ 1\n]", "[\t\r1]"))
    assert not any(accepts(grammars, wanted, text) for text in ("[\u30001]", "[\xa01]", "[\x0c1]", "[   1]"))
