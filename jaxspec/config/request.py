"""A caller's request and its result: plain host data, no jax.

`SamplingParams` is validated when it is made, so later code may trust it. Limits that depend on the model (vocabulary,
context length, page pool) are checked by the engine when the request is added.
"""

from __future__ import annotations

import copy
import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

from jaxspec.config.options import as_python

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float, Int

MAX_LOGPROBS = 20  # OpenAI's limit; every sampled row computes this many
MAX_STOP_IDS = 32  # stop token ids of one request, the model's own end tokens included
MAX_LOGIT_BIAS = 300  # OpenAI's limit
MAX_STOPS, MAX_STOP_LENGTH = 64, 256  # stop strings, and characters of each: all are looked for at every token
MAX_N = 128
REPORTS = ("return_hidden_states", "return_routed_experts")  # what an engine keeps if it is told to
# How a token came: as a draft that the model accepted; as the model's own choice in place of a rejected draft; as its
# own after all drafts of the round were accepted; as its own where nothing was drafted, like the first after a prompt.
TOKEN_SOURCES = ("accepted", "corrected", "bonus", "plain")
MAX_GRAMMAR, MAX_NESTING = 2**18, 64  # characters of a grammar, levels of a schema
MAX_WHITESPACE = 1024  # characters of a whitespace pattern, which stands between any two parts of a text
TINY = 1e-30  # the device's float32 makes nothing of numbers much smaller, and infinity of what is divided by them


# The least and the greatest value of each field. The server's API description says the same.
NUMBERS = {
    "temperature": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "top_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 100.0),
}
IN_CHECKPOINTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # what generation_config.json sets
POSITIVE = ("top_p", "repetition_penalty")  # of these 0 is refused, and whatever is less than `TINY`
INTEGERS = {
    "top_k": (-1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "max_tokens": (1, 2**31 - 1),
    "n": (1, MAX_N),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
PRIORITIES = (-(2**31), 2**31 - 1)
TOKEN_IDS = "token ids, which are integers of at least 0 and below the vocabulary's size"  # the engine knows that
FIRST_VERSION = "default"  # of the weights that an engine starts with, as SGLang calls it
CONTEXT_EXCEEDED = "context_length_exceeded"  # OpenAI's code


class RequestError(ValueError):
    """A request that can't be served. `param` names the field at fault and `code` is OpenAI's, for the error body of
    the server."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param, self.code = param, code


@contextmanager
def of_prompt(number: int | None) -> Iterator[None]:
    """Let errors about `prompt` name the one of several that has this number: "prompt[2]"."""
    try:
        yield
    except RequestError as error:
        if number is None or error.param != "prompt":
            raise
        raise RequestError(str(error), f"prompt[{number}]", error.code) from error.__cause__


class Busy(RuntimeError):
    """Refusal of a request that can't be served right now, for no fault of its own. Send it again later."""


class LogitsError(RuntimeError):
    """The end of a completion whose logits aren't finite numbers, so that no token follows."""


_short = reprlib.Repr(maxstring=60, maxlong=60, maxother=60)
_WORDS = {None: "null", True: "true", False: "false"}


def shown(value: Any) -> str:
    """A value as an error quotes it, in JSON's words and however large it is."""
    if isinstance(value, Mapping):
        return f"an object with {len(value)} field{'s' * (len(value) != 1)}" if value else "an empty object"
    if isinstance(value, list | tuple):
        if any(isinstance(each, Mapping | list | tuple) for each in value[:4]) or len(value) > 4:
            return f"a list with {len(value)} item{'s' * (len(value) != 1)}"
        return f"[{', '.join(map(shown, value))}]"
    if value is None or isinstance(value, bool):
        return _WORDS[value]
    return _short.repr(value)


@dataclass(frozen=True)
class StructuredOutput:
    """A grammar that generated text must follow. Exactly one of the first four is given.

    **Arguments:**

    - `json`: a JSON schema, as a mapping or as text; True is any JSON object.
    - `regex`: a regular expression that the whole text matches, in Rust's syntax, without anchors or look-around. Its
      `\\d` and `\\w` are ASCII, as in a schema's `pattern`.
    - `choice`: the texts to choose from.
    - `grammar`: a context-free grammar, in Lark's syntax or as GBNF (llama.cpp's EBNF).
    - `whitespace_pattern`: with `json`, a regular expression of what may stand between its parts; "" is nothing.
    - `strict`: with `json`, refuse a schema of which a part can't be enforced exactly. Otherwise `oneOf` whose options
      may overlap is `anyOf`, and `uniqueItems` is left to the model.
    - `name`: the field that errors name, as the client wrote it, in place of one of the first four.
    - `schemas`: lowered schemas within a `grammar`, as (label, text): errors name the one at fault, and its part.

    **Attributes:** `kind`, which of the four it is; `text`, that as text; `prefix`, see `after`; `others`, see
    `unless`; `field`, its `name` or its kind.

    **Raises:** `RequestError` naming the field. Whether a grammar compiles is known when its request is prepared.
    """

    json: InitVar[Mapping[str, Any] | str | bool | None] = None
    regex: InitVar[str | None] = None
    choice: InitVar[Sequence[str] | None] = None
    grammar: InitVar[str | None] = None
    whitespace_pattern: str | None = None
    strict: bool = False
    name: str | None = field(default=None, compare=False)
    schemas: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)
    kind: str = field(init=False)
    text: str = field(init=False, repr=False)
    prefix: tuple[str, str] | None = field(default=None, init=False)
    others: tuple[tuple[str, ...], tuple[str, ...]] | None = field(default=None, init=False)

    def __post_init__(self, json, regex, choice, grammar):
        named = {"json": json, "regex": regex, "choice": choice, "grammar": grammar}
        given = {name: value for name, value in named.items() if value is not None}
        if len(given) != 1:
            which = f"got {' and '.join(given)}" if given else "got none"
            raise RequestError(f"structured output takes exactly one of {', '.join(named)}; {which}", "structured")
        ((kind, value),) = given.items()
        object.__setattr__(self, "kind", kind)
        try:
            text = _GRAMMARS[kind](value)
        except ValueError as error:
            raise RequestError(f"{self.field} {error}", self.field) from None
        if len(text) > MAX_GRAMMAR:
            raise RequestError(f"{self.field} {_too_long(text)}", self.field)
        if self.whitespace_pattern is not None:
            if kind != "json":
                raise RequestError(
                    f"whitespace_pattern applies to json alone; {kind} describes whitespace itself",
                    "whitespace_pattern",
                )
            if not isinstance(self.whitespace_pattern, str):
                raise RequestError(
                    f"whitespace_pattern must be a string, got {shown(self.whitespace_pattern)}", "whitespace_pattern"
                )
            if len(self.whitespace_pattern) > MAX_WHITESPACE:
                raise RequestError(
                    f"whitespace_pattern has {len(self.whitespace_pattern)} characters, at most {MAX_WHITESPACE} are "
                    "allowed",
                    "whitespace_pattern",
                )
        object.__setattr__(self, "text", text)

    @property
    def field(self) -> str:
        return self.name or self.kind

    def after(self, opens: str, closes: str) -> StructuredOutput:
        """Copy behind free text, such as reasoning, that stands between two markers and may be left out. With "" as the
        opening marker the text begins inside of it, and the closing one must come."""
        behind = copy.copy(self)
        object.__setattr__(behind, "prefix", (opens, closes))
        return behind

    def unless(self, openings: Sequence[str], markers: Sequence[str]) -> StructuredOutput:
        """Copy in whose place another text may stand. It begins with one of `openings`, as a call's marker, is free
        from there on, and may have `markers` that are tokens of their own."""
        free = copy.copy(self)
        object.__setattr__(free, "others", (tuple(openings), tuple(markers)))
        return free


def _too_long(text: str) -> str:
    return f"has {len(text)} characters, at most {MAX_GRAMMAR} are allowed"


def _schema(value: Any) -> str:
    if value is True:
        value = {"type": "object"}
    if isinstance(value, str):
        if len(value) > MAX_GRAMMAR:  # before anyone reads it
            raise ValueError(_too_long(value))
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is not a JSON text: {error}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a JSON schema, which is an object, or true for any object; got {shown(value)}")
    if _deeper(value, MAX_NESTING):
        raise ValueError(f"is nested deeper than {MAX_NESTING} levels")
    try:
        return json.dumps(value, default=dict)
    except (TypeError, ValueError) as error:
        raise ValueError(f"can't be written as JSON: {error}") from None


def _deeper(value: Any, most: int) -> bool:
    """Whether containers are nested more than `most` deep."""
    level = [value]
    for _ in range(most + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, Mapping | list | tuple)
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
        if not level:
            return False
    return True


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a non-empty string, got {shown(value)}")
    return value


def _choices(value: Any) -> str:
    if not isinstance(value, list | tuple):
        raise ValueError(f"takes a list of non-empty strings, got {shown(value)}")
    if not value:
        raise ValueError(
            "takes a list of non-empty strings to choose from, and this list is empty; add one or leave it out"
        )
    for index, each in enumerate(value):
        if not isinstance(each, str) or not each:
            raise ValueError(f"takes a list of non-empty strings, got {shown(each)} at place {index}")
    return json.dumps(list(value))


_GRAMMARS = {"json": _schema, "regex": _text, "choice": _choices, "grammar": _text}  # each raises what is wrong


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. Names and meanings are those of vLLM and OpenAI.

    **Arguments:**

    - `temperature`: 0 is greedy; otherwise logits are divided by it.
    - `top_k`: keep the k most likely tokens; 0 or -1 keeps all. `top_p`: keep the smallest set whose mass reaches it.
    - `min_p`: keep tokens at least this fraction as likely as the most likely one. Applied before top-k and top-p.
    - `seed`: the same seed gives the same text, whatever else is in the batch. None draws one, by the engine's `seed`.
    - `max_tokens`: at most this many new tokens; None means up to the context length.
    - `min_tokens`: end tokens and `stop_token_ids` can't be chosen, nor stop strings end the text, before this many.
    - `stop`: strings that end the text and are cut from it, up to 64 of up to 256 characters. `stop_token_ids`: token
      ids that end it.
    - `ignore_eos`: the model's own end tokens don't end the text.
    - `skip_special_tokens`: leave special tokens out of the text. `include_stop_str_in_output`: keep the stop string,
      or the stop token's text, that ended it.
    - `kept_special_tokens`: special tokens, by their text, that the text shows where it leaves out others.
    - `n`: completions of one prompt, at most 128; completion i has `seed` + i.
    - `logprobs`: how many top log-probabilities to report per token (None: none; the chosen token's own is always among
      those reported). `prompt_logprobs`: the same for the prompt's tokens.
    - `presence_penalty`, `frequency_penalty`: subtracted from logits of tokens generated so far, as OpenAI defines.
    - `repetition_penalty`: divides (multiplies, if negative) the logits of tokens in prompt or output; 1 is off.
    - `logit_bias`: token id -> number added to its logit.
    - `no_tokens`: nothing of the text is asked for, so its one token (`max_tokens` is 1) needs no room in the context.
    - `speculative`: False decodes this request without drafts.
    - `fixed_drafts`: rounds with this request have all drafts, as with `--draft-policy fixed`.
    - `token_sources`: report of each token how it came, one of `TOKEN_SOURCES`.
    - `return_hidden_states`, `return_routed_experts`: report the final hidden state, or the experts that each mixture
      chose, of every token but the last, the prompt's included. The engine needs `enable_return_hidden_states`, or
      `enable_return_routed_experts`.
    - `cache_salt`: the prefix cache is shared with requests of the same salt alone. None: with those without one.
    - `structured`: a grammar that the text follows, a `StructuredOutput`. It ends where the grammar does. Everything
      else means what it means without; with `ignore_eos`, the text doesn't end before it must.

    **Raises:** `RequestError` naming the field, what was given and what is allowed.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 128
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    kept_special_tokens: Sequence[str] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    no_tokens: bool = False
    speculative: bool = True
    fixed_drafts: bool = False
    token_sources: bool = False
    return_hidden_states: bool = False
    return_routed_experts: bool = False
    cache_salt: str | None = None
    structured: StructuredOutput | None = None

    def __post_init__(self):
        self._settle_containers()
        for name, (low, high) in NUMBERS.items():
            _number(name, getattr(self, name), low, high)
        for name, (low, high) in INTEGERS.items():
            value = getattr(self, name)
            if value is None and name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
                continue
            _integer(name, value, low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", "min_tokens"
            )
        if bad := [s for s in self.stop if not isinstance(s, str) or not s]:
            raise RequestError(f"stop takes non-empty strings, got {shown(bad[0])}", "stop")
        if len(self.stop) > MAX_STOPS or any(len(s) > MAX_STOP_LENGTH for s in self.stop):
            given = f"{len(self.stop)}, the longest of {max(map(len, self.stop))}"
            raise RequestError(
                f"stop takes at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH} characters, got {given}", "stop"
            )
        for token in self.stop_token_ids:
            _token_id("stop_token_ids", "takes", token)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS} are allowed", "logit_bias"
            )
        for token, bias in self.logit_bias.items():
            _token_id("logit_bias", "takes as keys", token)
            if not _is_number(bias, -100, 100):
                raise RequestError(
                    f"logit_bias takes numbers from -100 to 100, got {shown(bias)} for the token {token}", "logit_bias"
                )
        if self.fixed_drafts and not self.speculative:
            raise RequestError("fixed_drafts asks for drafts and speculative: false for none; send one", "fixed_drafts")
        if self.cache_salt is not None and not (isinstance(self.cache_salt, str) and self.cache_salt):
            raise RequestError(f"cache_salt must be a non-empty string, got {shown(self.cache_salt)}", "cache_salt")
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise RequestError(f"structured takes a StructuredOutput, got {self.structured!r}", "structured")
        switches = ("ignore_eos", "speculative", "fixed_drafts", "token_sources", *REPORTS)
        for name in (*switches, "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {shown(getattr(self, name))}", name)

    def read_as(self, kept_special_tokens: tuple[str, ...], structured: StructuredOutput | None) -> SamplingParams:
        """Copy with these two fields, which must be as `SamplingParams` checks them. Nothing is checked again."""
        same = copy.copy(self)
        object.__setattr__(same, "kept_special_tokens", kept_special_tokens)
        object.__setattr__(same, "structured", structured)
        return same

    def _settle_containers(self) -> None:
        """Check the kinds of the fields that hold several values, and keep copies that nobody else can change."""
        for name, value in vars(self).items():
            object.__setattr__(self, name, as_python(value))  # the dataclass is frozen
        for name, kinds, what in (
            ("stop", (str, list, tuple), "a string or a list of strings"),
            ("stop_token_ids", (list, tuple), "a list of token ids"),
            ("kept_special_tokens", (list, tuple), "a list of special tokens"),
            ("logit_bias", (Mapping,), "a mapping from token id to a number"),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise RequestError(f"{name} must be {what}, got {shown(value)}", name)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(map(as_python, self.stop_token_ids or ())))
        object.__setattr__(self, "kept_special_tokens", tuple(self.kept_special_tokens or ()))
        bias = {as_python(token): as_python(value) for token, value in (self.logit_bias or {}).items()}
        object.__setattr__(self, "logit_bias", bias)


def _number(name: str, value, low: float, high: float) -> None:
    if name in POSITIVE:
        low, span = TINY, f"greater than 0 (at least {TINY:g}) and at most {high:g}"
    else:
        span = f"from {low:g} to {high:g}"
    if not _is_number(value, low, high):
        given = shown(value).removesuffix(".0")  # an integer may have become a float
        raise RequestError(f"{name} must be a number {span}, got {given}", name)


def _is_number(value, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high  # NaN isn't


def _integer(name: str, value, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} must be an integer from {low} to {high}, got {shown(value)}", name)


def _token_id(name: str, takes: str, value) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise RequestError(f"{name} {takes} {TOKEN_IDS}, got {shown(value)}", name)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, of the model's raw distribution (before penalties and temperature), or
    with `logprobs_mode="processed_logprobs"` of the one that the token was drawn from.

    `top` lists (token id, logprob), most likely first; `logprob` is that of the token that stands there.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Completion:
    """One generated continuation. `token_ids` are the generated tokens only; `text` stops before a stop string."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    logprobs: list[TokenLogprobs] | None = None
    token_sources: list[str] | None = None  # of each of `token_ids`, if asked for
    hidden_states: Float[np.ndarray, "t d"] | None = None  # of prompt and text but the last token, if asked for
    routed_experts: Int[np.ndarray, "t l k"] | None = None  # as `hidden_states`, by mixture


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds, on the host's clock, from the moment the request was prepared.

    Of a `RequestOutput` with several completions: the first one's `queue` and `ttft`, the last one's `latency`, and
    sums.
    """

    queue: float | None = None  # time to the start of the prefill
    ttft: float | None = None  # time to the first token
    latency: float | None = None  # time to the last
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    cached_on_host: int = 0  # those of them that came from the host's memory
    cached_on_disk: int = 0  # and from its disk
    output_tokens: int = 0
    verify_rounds: int = 0
    verified_tokens: int = 0  # tokens those rounds yielded, the bonus of each included
    preemptions: int = 0
    drafted_tokens: int = 0  # draft tokens that those rounds verified
    acceptance_histogram: list[int] = field(default_factory=list)  # [j]: rounds with a draft that accepted j of it
    weight_version: str = FIRST_VERSION  # of the weights that the last token is from

    @property
    def accept_length(self) -> float:
        """Tokens per verify round, bonus included; 0 before the first round."""
        return self.verified_tokens / self.verify_rounds if self.verify_rounds else 0.0


@dataclass(slots=True)
class RequestOutput:
    """Everything about one finished prompt. `text`, `token_ids`, ... are completion 0's of all `completions`.

    `prompt` is None where token ids were given. `prompt_logprobs`, if asked for, has an entry for each of
    `prompt_token_ids`: None for the first, which nothing comes before.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    text = property(lambda self: self.completions[0].text)
    token_ids = property(lambda self: self.completions[0].token_ids)
    finish_reason = property(lambda self: self.completions[0].finish_reason)
    logprobs = property(lambda self: self.completions[0].logprobs)


@dataclass(slots=True)
class Delta:
    """Tokens and text that one completion of a request gained since its last delta. The last one has a `finish_reason`.

    Text can lag tokens: characters that are still incomplete, or might begin a stop string, wait for a later delta.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None  # with the finish_reason
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # with completion 0's first delta, if asked for
    token_sources: list[str] | None = None  # of each of `token_ids`, if asked for
    hidden_states: Float[np.ndarray, "t d"] | None = None  # with the finish_reason, as of `Completion`
    routed_experts: Int[np.ndarray, "t l k"] | None = None  # likewise
    error: Exception | None = None  # with the finish_reason "error": why this completion failed, and it alone


def sources_of(emitted: int, accepted: int, drafted: int) -> list[str]:
    """The source of each token that a round emitted, of `TOKEN_SOURCES`: after the drafts comes the model's own."""
    own = "plain" if not drafted else "bonus" if accepted > drafted else "corrected"
    return [*["accepted"] * (accepted - 1), own][:emitted]
