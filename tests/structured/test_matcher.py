"""Masks of a round's rows along chains and trees, forced text, and matchers that fail."""

import numpy as np
import pytest

from jaxspec import StructuredOutput
from jaxspec.structured.grammar import GrammarFailed, Grammars, round_masks
from jaxspec.structured.masks import allows
from tests.server.fake import byte_tokenizer
from tests.support.tiny import BYTE_VOCAB

END = 258
CHAIN = [0, 1, 2, 3, 4]


@pytest.fixture(scope="module")
def grammars():
    return Grammars(byte_tokenizer(), BYTE_VOCAB, [END, 256])


def start(grammars, **options):
    avoid = options.pop("avoid_end", False)
    return grammars.start(grammars.compile(StructuredOutput(**options)), avoid)


def allowed(row):
    return "".join(chr(token) if token < 256 else "$" for token in range(BYTE_VOCAB) if allows(row, token))


def rows(matcher, drafts, parents=None, width=6):
    told = np.zeros((1, 1 + 2 * (width - 1)), np.int32)
    told[0, 0] = len(drafts)
    told[0, 1 : 1 + len(drafts)] = [ord(d) if isinstance(d, str) else d for d in drafts]
    told[0, width:] = (parents or CHAIN)[: width - 1] + [0] * (width - 1 - len(parents or CHAIN))
    bits, forced = round_masks([matcher], told, width, BYTE_VOCAB)
    return bits[0], [row[1 : 1 + row[0]].tolist() for row in forced[0]]


def test_rows_of_a_chain(grammars):
    matcher = start(grammars, regex="a(b|c)[xy]z?")
    for _ in range(2):  # a walk leaves no trace
        bits, _ = rows(matcher, "acx")
        assert [allowed(row) for row in bits[:4]] == ["a", "bc", "xy", "z$$"]
    matcher.advance([ord("a")])
    assert allowed(rows(matcher, "b")[0][0]) == "bc"


def test_a_forbidden_draft_ends_the_walk_and_later_rows_allow_all(grammars):
    bits, _ = rows(start(grammars, regex="a(b|c)[xy]z?"), "aqx")
    assert allowed(bits[1]) == "bc"
    assert (bits[2:] == 0xFFFFFFFF).all()


def test_rows_of_a_tree(grammars):
    """a over b and c, of which c has x."""
    bits, _ = rows(start(grammars, regex="a(bq|c[xy]z)"), "abcx", [0, 1, 1, 3])
    assert [allowed(row) for row in bits[:5]] == ["a", "bc", "q", "xy", "z"]


def test_forced_text_follows_a_row_that_was_forced(grammars):
    matcher = start(grammars, regex="abcde(f|g)")
    bits, forced = rows(matcher, "ab")
    assert [allowed(row) for row in bits[:3]] == ["a", "b", "c"]
    assert [bytes(each).decode() for each in forced[:3]] == ["bcde", "cde", "de"]
    assert matcher.advance(b"ab") == 2
    assert bytes(matcher.forced_next(5)) == b"cde" and bytes(matcher.forced_next(2)) == b"cd"
    bits, forced = rows(matcher, "cde")
    assert set(allowed(bits[3])) == {"f", "g"} and forced[3] == []
    assert matcher.advance(b"cdef") == 3  # all but the last had no choice
    assert matcher.forced_next(5) == []  # since the last had one
    assert allowed(rows(matcher, "")[0][0]) == "$$"


def test_the_end_is_forced_text_too(grammars):
    matcher = start(grammars, regex="(x|y)bc")
    matcher.advance(b"x")
    _, forced = rows(matcher, "bc")
    assert forced[:2] == [[ord("c"), END], [END]]


def test_the_end_is_avoided_while_something_else_is_allowed(grammars):
    matcher = start(grammars, regex="a*b?", avoid_end=True)
    bits, _ = rows(matcher, "ab")
    assert [allowed(row) for row in bits[:3]] == ["ab", "ab", "$$"]


@pytest.mark.parametrize("drafts", ["", "aa", "b"])
def test_end_tokens_are_drafts_that_lead_nowhere(grammars, drafts):
    matcher = start(grammars, regex="a*b?")
    bits, _ = rows(matcher, [*drafts, END, "a"])
    assert "$" in allowed(bits[len(drafts)])
    matcher.advance([*drafts.encode(), END])


def test_a_token_that_the_grammar_forbids_fails(grammars):
    matcher = start(grammars, regex="ab")
    with pytest.raises(GrammarFailed, match="can't follow its grammar"):
        matcher.advance(b"ax")


def test_of_several_matchers_each_has_its_own_rows(grammars):
    matchers = [start(grammars, regex="a+"), None, start(grammars, choice=["xy", "z"])]
    drafts = np.array([[1, ord("a")], [1, 5], [1, ord("x")], [0, 0]], np.int32)  # and a row of padding
    bits, forced = round_masks(matchers, drafts, 2, BYTE_VOCAB)
    assert [allowed(bits[i, 0]) for i in (0, 2)] == ["a", "xz"]
    assert (bits[[1, 3]] == 0xFFFFFFFF).all() and not forced[[1, 3]].any()
    assert allowed(bits[2, 1]) == "y" and forced[2, 1].tolist() == [1, END]
