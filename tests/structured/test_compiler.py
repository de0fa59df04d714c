"""Grammars that cost too much are ended where they compile, and nobody else notices; ordinary large ones are served."""

import contextlib
import json
import os
import signal
import threading
import time

import pytest

from jaxspec import RequestError, StructuredOutput
from jaxspec.config.request import MAX_GRAMMAR, Busy
from jaxspec.structured import compiler, limits
from jaxspec.structured.grammar import Grammars
from jaxspec.structured.regex import with_classes
from tests.server.fake import byte_tokenizer
from tests.support.tiny import BYTE_VOCAB


@pytest.fixture(scope="module")
def grammars():
    made = Grammars(byte_tokenizer(), BYTE_VOCAB, [258])
    made.compile(StructuredOutput(regex="a"))
    yield made
    made.close()


def patterns(count, schema=lambda i: {"type": "string"}):
    return {"type": "object", "patternProperties": {f"^p{i}_[a-z]+$": schema(i) for i in range(count)}}


def properties(count, **more):
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}, **more}


SLOW = StructuredOutput(json=patterns(400, lambda i: {"type": "integer", "minimum": i}))


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@contextlib.contextmanager
def undisturbed():
    """Check that within, other threads are never kept from running for a second, and memory doesn't grow by 300 MB."""
    longest, ended, before = 0.0, threading.Event(), resident()

    def tick():
        nonlocal longest
        last = time.monotonic()
        while not ended.wait(0.01):
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    thread = threading.Thread(target=tick)
    thread.start()
    yield
    ended.set()
    thread.join()
    assert longest < 1 and resident() - before < 300e6


FULL = MAX_GRAMMAR - 100
DEFINITIONS = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {}}
DRILLS = {
    "slashes": {"grammar": "start: /a/\n" + r"\/" * (FULL // 2)},
    "quotes": {"grammar": 'start: "a"\n' + '"' * FULL},
    "line ends": {"grammar": "\n" * FULL},
    "rules": {"grammar": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(9000)) + 'r9000 ::= "a"'},
    "parentheses": {"grammar": "root ::= " + "(" * FULL},
    "brackets": {"regex": "[" * FULL},
    "counts": {"regex": "{1" * (FULL // 2)},
    "groups": {"regex": "(" * FULL},
    "hyphens": {"regex": "[-" * (FULL // 2)},
    "class": {"regex": "[[:" + "a" * FULL},
    "pattern": {"json": {"pattern": "[" * FULL}},
    "states": {"regex": "(?s:.*)(" + "|".join(f"{chr(97 + i)}(?s:.{{{15 + i}}})" for i in range(20)) + ")"},
    "multiples": {"json": {"allOf": [{"type": "integer", "multipleOf": each} for each in (9973, 9967, 9949)]}},
    "patterns": {"json": patterns(400, lambda i: {"type": "integer", "minimum": i})},
    "patterns in Lark": {"grammar": f"start: a\na: %json {json.dumps(patterns(400, lambda i: {'minimum': i}))}"},
    "doubling": {"json": {"$defs": DEFINITIONS, "$ref": "#/$defs/d0"}},
    "lengths": {"json": {"type": "string", "minLength": 10**9}},
    "ambiguous": {"grammar": 'start: e\ne: e e e | e e | " "'},
    "deep": {"grammar": "start: R0\n" + "".join(f'R{i}: R{i + 1} | "a"\n' for i in range(9000)) + 'R9000: "b"'},
    "choices": {"choice": [f"value {i}" for i in range(15_000)]},
    "properties": {"json": properties(7000)},
}
ORDINARY = ("slashes", "brackets", "counts", "multiples", "ambiguous", "parentheses")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ORDINARY else pytest.mark.exhaustive) for name in DRILLS]
)
def test_no_grammar_keeps_other_threads_from_running_or_takes_the_memory(grammars, monkeypatch, name):
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 1)
    with undisturbed(), contextlib.suppress(RequestError):
        grammars.compile(StructuredOutput(**DRILLS[name]))


@pytest.mark.parametrize("check,text", [
    (limits.check_lark, "/" + r"\/" * (FULL // 2)),
    (limits.check_lark, '"' + r"\"" * (FULL // 2)),
    (limits.check_lark, "%json" * (FULL // 5)),
    (limits.check_lark, "//" * (FULL // 2)),
    (limits.expanded, "[" * FULL),
    (limits.expanded, "{" * FULL),
    (limits.expanded, "{" + "1" * FULL),
    (limits.expanded, "(a{9}" * (FULL // 5)),
    (with_classes, "[[:" + "a" * FULL),
    (with_classes, "[-" * (FULL // 2)),
    (with_classes, "[[:a" * (FULL // 4)),
])  # fmt: skip
def test_checks_are_linear(check, text):
    began = time.thread_time()
    with contextlib.suppress(limits.TooCostly):
        check(text)
    assert time.thread_time() - began < 2


@pytest.mark.parametrize("given,bound,words", [
    ({"json": patterns(400, lambda i: {"type": "integer", "minimum": i})}, "COMPILE_SECONDS", "longer than 1 seconds"),
    ({"json": {"prefixItems": [{"type": "integer", "multipleOf": 9000 + i} for i in range(30)]}}, "COMPILE_BYTES",
     "more than 12 MiB"),
])  # fmt: skip
def test_what_takes_too_much_is_ended_and_the_next_is_served(grammars, monkeypatch, given, bound, words):
    monkeypatch.setattr(compiler, bound, {"COMPILE_SECONDS": 1, "COMPILE_BYTES": 12 * 2**20}[bound])
    with pytest.raises(RequestError, match=words) as caught:
        grammars.compile(StructuredOutput(**given, name="its_field"))
    assert caught.value.param == "its_field"
    grammars.compile(StructuredOutput(regex=f"after {bound}"))


def test_others_are_asked_to_come_again_while_grammars_compile_and_kept_ones_are_served(grammars, monkeypatch):
    monkeypatch.setattr(compiler, "WAIT_SECONDS", 0.05)
    kept = grammars.compile(StructuredOutput(regex="kept"))
    with contextlib.ExitStack() as turns:
        for _ in range(compiler.AT_ONCE):
            turns.enter_context(grammars._compiler.turn())
        with pytest.raises(Busy, match="send the request again"):
            grammars.compile(StructuredOutput(regex="new"))
        assert grammars.compile(StructuredOutput(regex="kept")) is kept
    grammars.compile(StructuredOutput(regex="new"))


def test_one_grammar_that_many_ask_for_compiles_once(grammars, monkeypatch):
    prove, asked = grammars._compiler.prove, []
    monkeypatch.setattr(grammars._compiler, "prove", lambda wanted: (asked.append(wanted), prove(wanted))[1])
    wanted, found = StructuredOutput(json=properties(300)), []
    threads = [threading.Thread(target=lambda: found.append(grammars.compile(wanted))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1 and len(set(map(id, found))) == 1


def test_a_process_that_was_killed_is_started_again(grammars):
    children = [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and compiles(pid)]
    assert children
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    grammars.compile(StructuredOutput(regex="once more"))


def compiles(pid):
    """Whether a process is one of ours that compile grammars."""
    try:
        with open(f"/proc/{pid}/cmdline") as file, open(f"/proc/{pid}/stat") as stat:
            return "compile_server" in file.read() and int(stat.read().rpartition(")")[2].split()[1]) == os.getpid()
    except OSError:
        return False


def test_closing_ends_what_compiles():
    made, heard = Grammars(byte_tokenizer(), BYTE_VOCAB, [258]), []
    made.compile(StructuredOutput(regex="a"))

    def compile():
        try:
            made.compile(SLOW)
        except Busy as error:
            heard.append(error)

    thread = threading.Thread(target=compile)
    thread.start()
    time.sleep(0.2)
    began = time.monotonic()
    made.close()
    thread.join(1)
    assert heard and time.monotonic() - began < 1
    with pytest.raises(Busy, match="closed"):
        made.compile(StructuredOutput(regex="b"))


def follow(grammars, wanted, text):
    """How many of a text's bytes can follow each other, and whether the grammar is complete then."""
    matcher = grammars.start(grammars.compile(wanted))._matcher
    for at, byte in enumerate(text.encode()):
        if matcher.try_consume_tokens([byte]) != 1:
            return at, matcher.get_error()
    return len(text), matcher.is_accepting()


@pytest.mark.parametrize("given,text", [
    ({"json": properties(2000)}, '{"p3":"a","p40":"b","p1999":"c"}'),
    ({"json": properties(2000, additionalProperties=False)}, '{"p3":"a","p1998":"b","p1999":"c"}'),
    ({"json": properties(7000, required=[f"p{i}" for i in range(7000)])}, '{"p0":"a","p1":"b","p2":"c"'),
    ({"choice": [f"choice {i}" for i in range(5000)]}, "choice 4999"),
    ({"json": {"enum": [f"value {i}" for i in range(5000)]}}, '"value 4999"'),
    pytest.param({"json": properties(4000)}, '{"p3":"a","p1998":"b","p3999":"c"}', marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_ordinary_large_grammars_are_served_to_their_end(grammars, monkeypatch, given, text):
    monkeypatch.setattr("jaxspec.config.request.MAX_GRAMMAR", 2**19)
    assert follow(grammars, StructuredOutput(**given), text) == (len(text), not text.endswith('"c"'))


def test_a_thousand_patterns_of_properties_are_served_and_mean_what_they_meant(grammars):
    wanted = StructuredOutput(json=patterns(1000) | {"additionalProperties": {"type": "integer"}})
    assert follow(grammars, wanted, '{"p7_a":"x","p999_b":"y","q":1}')[1] is True
    for text in ('{"p7_a":1', '{"p999_b":1', '{"q":"'):
        at, _ = follow(grammars, wanted, text)
        assert at == len(text) - 1


def test_a_property_may_have_a_keywords_name(grammars):
    named = {"default": {"format": "nickname"}, "patternProperties": {"type": "integer"}, "multipleOf": {"const": 1}}
    wanted = StructuredOutput(json={"type": "object", "properties": named, "required": list(named)})
    text = '{"default":null,"patternProperties":1,"multipleOf":1}'
    assert follow(grammars, wanted, text) == (len(text), True)
