"""The interruptible JSON parser: what `json.loads` says of a document, within limits that hold early."""

import contextlib
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.config.request import RequestError
from server.http import json_reader
from server.http.gate import MAX_BODY_BYTES
from server.http.json_reader import MAX_DEPTH, MAX_DIGITS, MAX_ITEMS, MAX_KEY, MAX_STRING, MAX_VALUES
from server.http.json_reader import walk as parse

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner), max_leaves=10
)


@settings(max_examples=100, deadline=None)
@given(VALUES, st.booleans(), st.sampled_from([None, 0, 1]))
def test_what_json_writes_is_read(value, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert parse(text.encode()) == json.loads(text) == value


@settings(max_examples=750, deadline=None)
@given(st.text(alphabet='[]{}:,"\\01e.-+ \nutrfalsn/é', max_size=12))
def test_whatever_json_refuses_is_refused(text):
    try:
        expected = json.loads(text)
    except ValueError:
        with pytest.raises(RequestError):
            parse(text.encode())
    else:
        assert repr(parse(text.encode())) == repr(expected)


@pytest.mark.parametrize("text", [
    '{"a":1,"a":2}', '"\\ud83d\\ude00"', '"\\ud800"', "[1,2,-3 , 4\n,5]", "[1,-0,1e3,1.50E-2]", '["\\\\","\\\\\\"",""]',
    "-0", "[NaN,Infinity,-Infinity]", "[" + "12," * 5000 + "1]", '"' + "\\\\" * 200 + '"', '"' + "\\\\" * 200 + '\\""',
    "[9223372036854775808,99999999999999999999999999]", " \t\r\n{ } ", " " * 9000 + "1", '"😀é"', "\ufeff[]",
])  # fmt: skip
def test_a_document_is_read_as_json_reads_it(text):
    assert repr(parse(text.encode())) == repr(json.loads(text.encode()))


@pytest.mark.parametrize(("body", "says"), [
    (b"", "a value is missing at byte 0"),
    (b"[1,2,]", "a value is missing at byte 5"),
    (b"[1 2]", "a comma or ] is missing at byte 3"),
    (b'{"a":1,}', "a key in double quotes is missing at byte 7"),
    (b'{"a" 1}', "a colon is missing at byte 5"),
    (b"[] []", "nothing may follow the value at byte 3"),
    (b"[01]", "a number begins with 0 at byte 1"),
    (b'"abc', "a string doesn't end that begins at byte 0"),
    (b'"a\nb"', "in the string at byte 0"),
    (b'"\\x"', "in the string at byte 0"),
    (b'["\xff"]', "isn't UTF-8 in the string that begins at byte 1"),
    (b"[" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} arrays and objects"),
    (b"9" * (MAX_DIGITS + 2), "a number of thousands of digits"),
    (b"0." + b"9" * (MAX_DIGITS + 2), "a number of thousands of digits"),
    (b'"' + b"a" * (MAX_STRING + 1) + b'"', f"a string of more than {MAX_STRING} bytes begins at byte 0"),
    (b'{"' + b"k" * (MAX_KEY + 1) + b'":1}', f"a key of more than {MAX_KEY} bytes begins at byte 1"),
    (b"[" + b"{}," * MAX_ITEMS + b"{}]", f"more than {MAX_ITEMS} strings, objects"),
    (b"[" + b"1," * MAX_VALUES + b"1]", f"more than {MAX_VALUES} values"),
    (b"[" + b'1,"a",' * MAX_ITEMS + b"1]", f"more than {MAX_ITEMS} strings, objects"),
])  # fmt: skip
def test_a_refusal_says_what_and_where(body, says):
    with pytest.raises(RequestError) as error:
        parse(body)
    assert says in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize("unit", ["\\ud83d\\ude00", "😀", "é\\u00e9", "\\\\", '\\"', "\\ud83d", "\\ud83d\\u0041"])
@pytest.mark.parametrize("before", ["", "a", "\\n", "ab" * 2047 + "a"])
def test_a_long_string_is_read_in_parts(unit, before):
    text = f'"{before}{unit * 3000}"'
    assert parse(text.encode()) == json.loads(text)


def test_what_is_at_a_limit_is_read():
    assert len(parse(b'"' + b"a" * MAX_STRING + b'"')) == MAX_STRING
    assert parse(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    assert parse(b"9" * MAX_DIGITS) == int("9" * MAX_DIGITS)
    assert len(parse(b"[" + b"1," * (MAX_VALUES - 2) + b"1]")) == MAX_VALUES - 1
    assert parse(b'{"' + b"k" * MAX_KEY + b'":1}')


def test_no_document_takes_long():
    """Runs that stop short of their end, quotes that end nothing, and space that goes on."""
    start = time.perf_counter()
    for unit in (b"1," * 1000 + b'"a",', b'"' + b'\\"' * 1000 + b'",', b'"' + b"\\\\" * 1000 + b'",', b" " * 5000):
        with contextlib.suppress(RequestError):
            parse(b"[" + unit * (4 * 2**20 // len(unit)) + b"1]")
    assert time.perf_counter() - start < 20  # about 2 s


def chat(size):
    """A chat of so many bytes, as clients write it: a long text, and tools."""
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}} for i in range(20)]
    text = 'He said "no", and\nwent on to {the} [next] \\ page: é. '
    messages = [{"role": "user", "content": text * 40}] * (size // 2300)
    return {"model": "m", "messages": messages, "tools": tools, "temperature": 0.5}


@pytest.mark.parametrize("value", [
    chat(200_000),
    {"prompt": "a word " * 28_000},
    {"prompt": [12345] * 100_000},
    {"prompt": 'a,b:[{"' * 24_000},
    {"prompt": "\\ \" \n" * 28_000},
    {"a": [{"b": [[]]}, {}] * 5000},
])  # fmt: skip
def test_a_body_of_200_kb_is_left_to_c(monkeypatch, value):
    monkeypatch.setattr(json_reader, "walk", lambda body: pytest.fail("it was walked"))
    for ascii_only in (True, False):
        assert json_reader.parse(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.speed
@pytest.mark.exhaustive
@pytest.mark.parametrize(("value", "most"), [
    (chat(200_000), 0.001),
    ({"prompt": "a word " * 28_000}, 0.001),
    ({"prompt": '"a": "b", ' * 14_000}, 0.001),
    ({"prompt": [*range(100_000, 129_000)]}, 0.001),
])  # fmt: skip
def test_a_body_of_200_kb_takes_about_a_millisecond(value, most):
    body, took = json.dumps(value).encode(), []
    for _ in range(20):
        start = time.thread_time()
        json_reader.parse(body)
        took.append(time.thread_time() - start)
    assert min(took) < most


@pytest.mark.parametrize("body", [
    b"[" + b"{}," * json_reader.VALUES_AT_ONCE + b"1]",
    b"[" + b'"a",' * json_reader.VALUES_AT_ONCE + b"1]",
    b"[" + b"1.0," * json_reader.VALUES_AT_ONCE + b"1]",
    b"[" + b"1," * json_reader.INTEGERS_AT_ONCE + b"1]",
    b'["' + b"a" * json_reader.AT_ONCE + b'"]',
])  # fmt: skip
def test_what_takes_longer_is_walked_where_others_get_a_turn(monkeypatch, body):
    monkeypatch.setattr(json_reader, "from_json", lambda *_, **options: pytest.fail("C has it all"))
    assert isinstance(json_reader.parse(body), list)


@settings(max_examples=250, deadline=None)
@given(st.text(alphabet='[]{}:,"\\01e.-+ \nutrfalsn/é', max_size=12))
def test_a_small_document_is_read_by_c_as_a_large_one_is_here(text):
    say = lambda read: _outcome(read, text.encode())  # noqa: E731
    assert say(json_reader.parse) == say(json_reader.walk)


@pytest.mark.parametrize("body", [
    b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, b"1" * (MAX_DIGITS + 1),
    b"1" * MAX_DIGITS, b"[0," + b"1" * (MAX_DIGITS + 1) + b"]", b"0." + b"1" * (MAX_DIGITS + 1),
    b'{"' + b"k" * (MAX_KEY + 1) + b'" : 1}',
    b'{"a": {"' + b'\\"' * MAX_KEY + b'": 1}}', b'["' + b"k" * (MAX_KEY + 1) + b'", 1]', b"[" * 5000, b"[" * 200_000,
    b"1],[2", b"1,2", b"],[", b"[" * MAX_DEPTH + b"1" + b"]" * MAX_DEPTH,
    b'{"a":' * MAX_DEPTH + b"{}" + b"}" * MAX_DEPTH, b'{"a":' * MAX_DEPTH + b"1" + b"}" * MAX_DEPTH,
    b"{" + b'"k":"v",' * MAX_ITEMS + b'"k":1}',
    b'["]"' + b",[" * MAX_DEPTH + b"]" * (MAX_DEPTH + 1), b'["\\"]"' + b",[" * MAX_DEPTH + b"]" * (MAX_DEPTH + 1),
    b'["[\\\\"' + b",[" * (MAX_DEPTH - 1) + b"]" * MAX_DEPTH,
    b"[" + b'{"a":1},' * MAX_ITEMS + b"1]", '"é"'.encode("utf-16"), "\ufeff[1]".encode(),
    b'["\xff"]', b'{"a": 1, "a": 2}',
])  # fmt: skip
def test_limits_are_those_of_a_large_one(body):
    assert _outcome(json_reader.parse, body) == _outcome(json_reader.walk, body)


def _outcome(read, body):
    try:
        return repr(read(body))
    except RequestError as error:
        return str(error)


def test_the_documents_limits_are_these():
    rows = f"""
| bytes of a body | | {MAX_BODY_BYTES >> 20} MiB | 413 |
| arrays and objects within one another | | {MAX_DEPTH} | 400 |
| values in a body, token ids included | | {MAX_VALUES:,} | 400 |
| values that aren't integers, and keys | | {MAX_ITEMS:,} | 400 |
| one string; one key | | {MAX_STRING >> 20} MiB; {MAX_KEY >> 20} MiB | 400 |
| digits of a number | | {MAX_DIGITS:,} | 400 |
"""
    assert rows in (Path(__file__).parents[3] / "docs/serving.md").read_text()
