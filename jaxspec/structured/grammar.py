"""Grammars of one engine: a request's grammar, compiled for the model's tokens, within limits."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from jaxspec.config.request import RequestError, StructuredOutput
from jaxspec.structured.limits import Watch, check
from jaxspec.structured.matcher import Matcher
from jaxspec.structured.regex import JSON_SPACE, with_classes
from jaxspec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model

IDLE = 128  # matchers of ended completions kept for a grammar, some 30 KiB each
KEPT = 64  # compiled grammars: agents send the same schemas again and again
WHITESPACE = r"[ \t\r\n]{1,64}"  # between a JSON text's parts: without an end, some models write nothing else
FORMATS = frozenset(  # of all drafts
    {
        *("color", "date", "date-time", "duration", "email", "hostname", "host-name", "idn-email", "idn-hostname"),
        *("ip-address", "ipv4", "ipv6", "iri", "iri-reference", "json-pointer", "phone", "regex"),
        *("relative-json-pointer", "style", "time", "uri", "uri-reference", "uri-template", "utc-millisec", "uuid"),
    }
)
LIMITS = LLParserLimits(verbose_errors=False)


class Grammar:
    """A compiled grammar, which makes matchers that share nothing.

    The library's copies of a matcher share what they find out of the grammar, behind a lock: 128 masks took as long on
    twelve threads as on one. A completion that ends gives its matcher back, with all that it has found out.
    """

    def __init__(self, make: Callable[[], LLMatcher], first: LLMatcher):
        self._make = make
        self._idle = [first]

    def take(self) -> LLMatcher:
        """A matcher before its first token; it is the caller's alone."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._make()

    def give_back(self, matcher: LLMatcher) -> None:
        """Keep a matcher for another completion, unless it has failed."""
        if not matcher.is_error() and len(self._idle) < IDLE:
            matcher.reset()
            self._idle.append(matcher)


class Grammars:
    """Compiles grammars over a vocabulary of `vocab` tokens, the model's own, of which some may be padding.

    Thread-safe. The library's own tokenizer is made at the first use, or by `warm_up`; it takes seconds.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, end_ids: Sequence[int]):
        self._tokenizer, self._vocab, self._end_ids = tokenizer, vocab, tuple(end_ids)
        self._compiled: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._made: LLTokenizer | None = None
        self._unreadable: str | None = None
        self._watch = Watch()
        self._making, self._turn = threading.Lock(), threading.Lock()

    def warm_up(self) -> None:
        """Read the vocabulary. A tokenizer that the library can't read is reported by `compile`."""
        with self._making:
            if self._made is None and self._unreadable is None:
                try:
                    text = self._tokenizer.to_json()
                    self._made = LLTokenizer(text, n_vocab=self._vocab, eos_token=list(self._end_ids))
                except Exception as error:
                    self._unreadable = _reason(str(error))

    def compile(self, wanted: StructuredOutput) -> Grammar:
        """A grammar, from the last few dozen if it is among them.

        **Raises:** `RequestError` naming the field, with the library's reason.
        """
        with self._turn:
            if (found := self._compiled.get(wanted)) is not None:
                self._compiled.move_to_end(wanted)
                return found
        check(wanted)
        self.warm_up()
        if (made := self._made) is None:
            why = f"the grammar library can't read this model's tokenizer: {self._unreadable}"
            raise RequestError(f"structured output can't be served: {why}", wanted.field)
        make = lambda: LLMatcher(made, self._source(wanted), log_level=0, limits=LIMITS)  # noqa: E731
        try:
            matcher = self._watch.run(wanted, make)
        except RequestError:
            raise
        except Exception as error:  # what a text that isn't a grammar sets off in one of the library's readers
            raise _refused(wanted, str(error)) from error
        if matcher.is_error():
            raise _refused(wanted, matcher.get_error())
        with self._turn:
            grammar = self._compiled[wanted] = Grammar(make, matcher)
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return grammar

    def _source(self, wanted: StructuredOutput) -> str:
        base = source(wanted)
        return base if wanted.prefix is None else behind(base, *wanted.prefix, self._tokenizer.added_tokens)

    def start(self, grammar: Grammar, avoid_end: bool = False) -> Matcher:
        """A completion's matcher, before its first token. It takes a millisecond or two if none is idle."""
        return Matcher(grammar, self._end_ids, avoid_end)


def source(wanted: StructuredOutput) -> str:
    """The grammar as the library takes it. **Raises:** anything, for text that can't be read."""
    if wanted.kind == "json":
        space = WHITESPACE if wanted.whitespace_pattern is None else wanted.whitespace_pattern
        options = {"whitespace_pattern": with_classes(space, JSON_SPACE)} if space else {"whitespace_flexible": False}
        schema = json.loads(wanted.text)
        _drop_unknown_formats(schema)
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    if wanted.kind == "regex":
        return LLMatcher.grammar_from_regex(with_classes(wanted.text))
    if wanted.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(wanted.text))))
    return LLMatcher.grammar_from_lark(any_to_lark(wanted.text))  # of text that isn't GBNF, that changes nothing


def _drop_unknown_formats(schema: dict[str, Any]) -> None:
    """Formats that no draft defines say nothing, by JSON Schema itself; the library would refuse them."""
    waiting: list[Any] = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            if isinstance(value.get("format"), str) and value["format"] not in FORMATS:
                del value["format"]
            waiting += [inner for key, inner in value.items() if key not in ("const", "enum", "default", "examples")]


def behind(base: str, opens: str, closes: str, tokens: Mapping[str, int]) -> str:
    """A grammar behind free text between markers: see `StructuredOutput.after`. A marker that is one of the added
    `tokens` is written as that token, since special ones aren't text."""
    mark = lambda marker: f"<[{tokens[marker]}]>" if marker in tokens else json.dumps(marker)  # noqa: E731
    ends = f"inner: ANY {mark(closes)}" if closes in tokens else f"inner[suffix={mark(closes)}]: ANY"
    start = f"start: block? @body\nblock: {mark(opens)} inner SPACE" if opens else "start: inner SPACE @body"
    around = f"%llguidance {{}}\n{start}\n{ends}\nANY: /(.|\\n)*/\nSPACE: /[ \\t\\r\\n]{{0,8}}/\n"
    (body,) = json.loads(base)["grammars"] if base.startswith('{"grammars"') else [{"lark_grammar": base}]
    return json.dumps({"grammars": [{"lark_grammar": around}, {**body, "name": "body"}]})


def _refused(wanted: StructuredOutput, text: str) -> RequestError:
    what = {"json": "the JSON schema", "regex": "the regular expression", "choice": "the choices"}
    kind = what.get(wanted.kind, "the grammar")
    return RequestError(f"{wanted.label}: {kind} can't be compiled: {_reason(text)}", wanted.field)


def _reason(text: str) -> str:
    """The library's message as one line: its first one, and what a regular expression's parser says at the end."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("<")]
    said = [line[:200] for line in (*lines[:1], *lines[1:]) if line is lines[0] or line.startswith("error:")]
    return " ".join(said[:2]) or "the grammar library gives no reason"


def grammars_of(model: Model, lazily: bool) -> Grammars | None:
    """Compiler of grammars for a model; None if it has no tokenizer, or no token that ends a text. It prepares itself
    in a thread, or if `lazily` at the first use."""
    if model.tokenizer is None or not model.eos_ids:
        return None
    grammars = Grammars(model.tokenizer, model.config.vocab_size, model.eos_ids)
    if not lazily:
        threading.Thread(target=grammars.warm_up, name="jaxspec-vocabulary", daemon=True).start()
    return grammars
