"""Constrained text in the engine: it follows its grammar, and drafts, overlap, company and preemption change nothing.

Plain constrained decoding is held against forwards over whole texts and a matcher of the test's own: each token is the
argmax of those that the grammar allows. Every drafter must then give what plain decoding gave.
"""

import dataclasses
import functools
import json
import re
import shutil

import jax
import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

import jaxspec
from jaxspec import LLM, SamplingParams, StructuredOutput
from jaxspec.scheduling.audit import audit
from tests.engine import test_lossless as lossless
from tests.support import heads, hybrids
from tests.support.faults import out_of_memory
from tests.support.tiny import write_byte_tokenizer

END = 258  # <|im_end|> of the byte tokenizer
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["alpha", "beta", "alphabet"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind", "size", "tags"],
    "additionalProperties": False,
}
COMPACT = StructuredOutput(json=SCHEMA, whitespace_pattern="")
GRAMMARS = {
    "compact": COMPACT,
    "spaced": StructuredOutput(json=SCHEMA, whitespace_pattern="[ \n]{1,3}"),
    "regex": StructuredOutput(regex="[a-c]{2,5}-(north|south)-[0-9]{3}(, [A-Z]+){0,2}"),
    "choice": StructuredOutput(choice=["a rather long answer", "a rather short one", "no"]),
    "lark": StructuredOutput(grammar='start: "(" (start | /[xy]{1,3}/) ")"'),
    "gbnf": StructuredOutput(grammar='root ::= "yes, " item{1,3} "."\nitem ::= "one " | "two "'),
    "endless": StructuredOutput(regex="[a-z ]*"),
}


def follows(name, text):
    """Whether a whole text is one of the grammar's, without the library that made the masks."""
    if name in ("compact", "spaced"):
        jsonschema.validate(json.loads(text), SCHEMA)
        return name != "compact" or text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
    patterns = {
        "regex": "[a-c]{2,5}-(north|south)-[0-9]{3}(, [A-Z]+){0,2}",
        "choice": "a rather long answer|a rather short one|no",
        "lark": r"\(+[xy]{1,3}\)+",
        "gbnf": "yes, (one |two ){1,3}\\.",
        "endless": "[a-z ]*",
    }
    return re.fullmatch(patterns[name], text) and (name != "lark" or text.count("(") == text.count(")"))


def prompt(n, seed=0):
    return np.random.default_rng([n, seed]).integers(0, 256, n).tolist()


def load(temperature=0.0):
    """Every kind of grammar, and requests without one, in a batch that doesn't fit the pool at once."""
    settings = functools.partial(SamplingParams, temperature=temperature, max_tokens=110)
    batch = [(prompt(29 + 3 * i), settings(structured=each, seed=i)) for i, each in enumerate(GRAMMARS.values())]
    shared = prompt(40)
    batch += [(prompt(33, 1), settings(ignore_eos=True, seed=50)), (prompt(8), settings(seed=51, max_tokens=9))]
    batch += [
        (shared, settings(structured=COMPACT, speculative=False, seed=60)),
        (shared, settings(structured=COMPACT, seed=60)),
    ]
    batch += [([*shared, 7], settings(structured=COMPACT, logit_bias={ord("9"): 5.0}, presence_penalty=1.0, seed=3))]
    batch += [(prompt(21), settings(structured=GRAMMARS["regex"], stop=["th-"], seed=4))]
    batch += [(prompt(22), settings(structured=GRAMMARS["regex"], stop_token_ids=[ord("-")], ignore_eos=True, seed=5))]
    batch += [(prompt(23), settings(structured=GRAMMARS["choice"], min_tokens=30, seed=6))]
    batch += [(prompt(24), settings(structured=GRAMMARS["gbnf"], n=2, seed=7, temperature=0.7))]
    return batch


def said(outs):
    return [(c.text, c.token_ids, c.finish_reason, c.stop_reason) for out in outs for c in out.completions]


def run(llm, batch, overlap=True):
    llm.engine.config = dataclasses.replace(llm.engine.config, disable_overlap=not overlap)
    outs = lossless.run(llm, batch)
    llm.engine.config = dataclasses.replace(llm.engine.config, disable_overlap=False)
    audit(llm.engine.scheduler)
    return outs


def tree_engine():
    folder = str(heads.folder_for("eagle"))
    return LLM(str(lossless.checkpoint("qwen3")), folder, **lossless.OPTIONS, topk=3, num_steps=3, num_draft_tokens=12)


@functools.cache
def engine(draft):
    if draft == "tree":
        return tree_engine()
    if draft in ("eagle", "eagle3"):
        draft = f"{heads.folder_for(draft)}"
    if draft == "dflash":
        from tests.drafters.test_dflash import drafter_folder

        draft = drafter_folder(lossless.checkpoint("qwen3"), 11)
        return LLM(str(lossless.checkpoint("qwen3")), draft, **lossless.OPTIONS)
    return lossless.engine("qwen3", draft)


@functools.cache
def plain():
    return run(engine("none"), load())


# -- the text ----------------------------------------------------------------------------------------------------------


def test_finished_texts_follow_their_grammars():
    outs, names = plain(), list(GRAMMARS)
    for name, out in zip(names, outs, strict=False):
        assert out.finish_reason == ("length" if name == "endless" else "stop"), (name, out.text)
        assert follows(name, out.text), (name, out.text)
    kinds = [each.completions[0] for each in outs[len(names) :]]
    assert kinds[0].finish_reason == "length"
    assert said([outs[9]]) == said([outs[10]])  # without drafts and with them
    assert kinds[5].stop_reason == "th-" and kinds[6].stop_reason == ord("-")
    assert follows("choice", kinds[7].text)  # the grammar's end comes before min_tokens
    assert all(follows("gbnf", completion.text) for completion in outs[-1].completions)


def own_matcher(structured):
    from jaxspec.structured.source import source

    tokenizer = LLTokenizer(engine("none").engine.tokenizer.to_json(), n_vocab=lossless.VOCAB, eos_token=END)
    return LLMatcher(tokenizer, source(structured))


def test_plain_text_is_the_argmax_of_what_the_grammar_allows():
    model = engine("none").engine.runner.model
    for (tokens, params), out in list(zip(load(), plain(), strict=True))[: len(GRAMMARS)]:
        text = [*tokens, *out.token_ids]
        padded = text + [0] * (lossless.OPTIONS["context_length"] - len(text))
        logits = np.asarray(jaxspec.logits(model, [padded])[0])
        matcher, mask, narrow = own_matcher(params.structured), allocate_token_bitmask(1, lossless.VOCAB), 0
        for place, token in enumerate(out.token_ids, len(tokens) - 1):
            fill_next_token_bitmask(matcher, mask)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: lossless.VOCAB].astype(bool)
            row = np.where(allowed, logits[place], -np.inf)
            assert row[token] >= row.max() - 1e-4
            narrow += row.max() < logits[place].max()
            assert matcher.consume_token(token)
        assert narrow, "the grammar never changed anything"


DRAFTS = (
    "ngram",
    "standalone:noisy",
    "tree",
    "standalone:self",
    "eagle",
    "eagle3",
    "dflash",
    f"{lossless.__name__}:Guess",
)


def drafts(often):
    """All drafters, of which `make test` takes `often`."""
    return [pytest.param(draft, marks=() if draft in often else pytest.mark.exhaustive) for draft in DRAFTS]


@pytest.mark.parametrize("draft", drafts(("ngram",)))  # test_matcher.py and test_programs.py have trees
def test_greedy_text_is_plain_decodings(draft):
    llm = engine(draft)
    before = llm.engine.stats()
    for overlap in (True, False) if draft == "ngram" else (True,):
        assert llm.engine.flush_cache()
        outs = run(llm, load()[:-1], overlap)  # without the last, which samples: programs of its own
        assert said(outs) == said(plain())[:-2]
    after = llm.engine.stats()
    assert after["preemptions_total"] > before["preemptions_total"]
    assert after["accepted_per_position"][0] > before["accepted_per_position"][0]
    assert after["forced_tokens_total"] > before["forced_tokens_total"]


# A grammar's samples are test_distribution.py's; overlap and preemption change no sample in ../test_engine.py.
@pytest.mark.parametrize("draft", drafts(()))
def test_sampled_text_is_the_same_with_and_without_overlap_preempted_or_not(draft):
    llm, outs = engine(draft), {}
    for overlap in (True, False):
        llm.engine.flush_cache()
        outs[overlap] = run(llm, load(temperature=1.0), overlap)
    assert said(outs[True]) == said(outs[False])
    assert sum(out.metrics.preemptions for out in outs[True])
    for i, one in list(enumerate(load(temperature=1.0)))[::5]:
        assert said(run(llm, [one])) == said(outs[True][i : i + 1])


@pytest.mark.exhaustive  # test_engine.py has it of text that no grammar constrains
def test_drafts_that_are_drawn_as_plain_decoding_draws_give_its_text():
    """Take an n-gram drafter, whose drafts a seed's draws are matched with."""
    assert said(run(engine("ngram"), load(1.0))) == said(run(engine("none"), load(1.0)))


@pytest.mark.exhaustive  # grammars and hybrids by themselves are in the tests above and in test_hybrid
def test_a_hybrid_with_its_module():
    source = hybrids.checkpoint("qwen3_5", lossless.VOCAB)
    folder = source.with_name(source.name + "-bytes")
    if not folder.exists():
        shutil.copytree(source, folder)
        write_byte_tokenizer(folder)
    options = lossless.OPTIONS | {"dtype": "float32", "max_state_snapshots": 10}
    texts = []
    for draft in ("none", "mtp"):
        llm = LLM(str(folder), draft, **options | ({} if draft == "none" else {"num_draft_tokens": 2}))
        llm.engine.scheduler.rounds = 1
        outs = run(llm, load()[: len(GRAMMARS) + 3])
        texts.append(said(outs))
        ended = [(name, out) for name, out in zip(GRAMMARS, outs, strict=False) if out.finish_reason == "stop"]
        assert len(ended) > 4 and all(follows(name, out.text) for name, out in ended)
    assert texts[0] == texts[1]
    assert llm.engine.stats()["accepted_per_position"][0]


# -- what speculation has of it ----------------------------------------------------------------------------------------


def test_forced_text_is_drafted_for_free():
    """A drafter that is hardly ever right has whole rounds accepted where the grammar leaves no choice."""
    one = StructuredOutput(choice=["the one and only answer that there is", "x"])
    llm = engine("ngram")
    bias = {ord("t"): 50.0, ord("x"): -50.0}
    params = SamplingParams(temperature=0.0, max_tokens=64, structured=one, logit_bias=bias)
    (out,) = llm.generate([[1, 2, 3]], params)
    assert out.text == "the one and only answer that there is"
    # The first token is free, and all others, the end too, are forced: drafts follow once one of those has come.
    tokens = len(out.token_ids)
    assert out.metrics.verify_rounds <= 2 + -(-(tokens - 2) // 4)


def test_a_grammar_that_fails_ends_its_request_alone():
    """One that the library compiles, and gives up on behind the tokens that were tried then."""
    rules = "\n".join(f"a{i}: a{i + 1} a{i + 1} a{i + 1}" for i in range(40))
    heavy = StructuredOutput(grammar=f'start: BEFORE a0\nBEFORE: /[a-z]{{60}}/\n{rules}\na40: "x"')
    core, ended = engine("ngram").engine, {}
    settings = functools.partial(SamplingParams, temperature=0.0, max_tokens=70)
    for name, structured in (("heavy", heavy), ("other", GRAMMARS["choice"]), ("plain", None)):
        core.add(core.prepare(prompt(9), settings(structured=structured), name))
    while core.busy:
        ended |= {delta.request_id: delta for delta in core.step() if delta.finish_reason}
    assert ended["heavy"].finish_reason == "error" and "follow its grammar" in str(ended["heavy"].error)
    assert ended["other"].finish_reason == "stop" and ended["plain"].finish_reason == "length"
    audit(core.scheduler)


@pytest.mark.parametrize("program", ["masked_first", "draft", "forward", "conclude"])
@pytest.mark.parametrize("fault", ["at the call", "behind it"])
def test_a_program_that_fails_leaves_the_engine_as_new(monkeypatch, program, fault):
    """Its grammars with it: the same requests, sent again, say what they would have said."""
    llm = engine("ngram")
    texts = [prompt(29), prompt(40)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=60, structured=GRAMMARS[name]) for name in ("compact", "regex")
    ]
    expected = said(llm.generate(texts, params))
    llm.engine.flush_cache()
    run_program = getattr(llm.engine.runner.programs, program)

    def exhausted(*args):
        results = run_program(*args)
        if fault == "behind it":
            return out_of_memory(results)
        raise jax.errors.JaxRuntimeError("Out of memory allocating 12345 bytes")

    with monkeypatch.context() as patch, pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        patch.setattr(llm.engine.runner.programs, program, exhausted)
        llm.generate(texts, params)
    audit(llm.engine.scheduler)
    assert not llm.engine.busy
    assert said(llm.generate(texts, params)) == expected


def test_unconstrained_requests_have_rounds_of_one_program():
    llm = engine("ngram")
    before = dict(llm.engine.stats()["dispatches"])
    llm.generate([prompt(9)], SamplingParams(temperature=0.0, max_tokens=5))
    gained = {name for name, n in llm.engine.stats()["dispatches"].items() if n > before.get(name, 0)}
    assert gained == {"admit", "prefill", "first_greedy", "round_greedy"}
