"""`--deterministic`: a row has the same bits whatever is beside it, and so has a text, whatever happened to it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams, load_model
from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.checkpoint.params import dummy
from jaxspec.compiling.ladder import ladder_of
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.options import ConfigError
from jaxspec.config.request import RequestError, StructuredOutput
from jaxspec.decoder.deterministic import DETERMINISTIC
from jaxspec.decoder.forward import forward, unembed
from jaxspec.decoder.low_rank import attached
from jaxspec.decoder.path import Call
from jaxspec.engine.deterministic import prepared
from jaxspec.models.families import llama, qwen3
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import Weight
from jaxspec.pallas.sliced_rows import sliced
from jaxspec.scheduling.audit import audit
from jaxspec.scheduling.sequence import Status
from tests.support import drawn, lora
from tests.support.engines import CROWDED, OPTIONS, checkpoint, idle, set_overlap, tokens
from tests.support.miniature import make, sequence
from tests.support.sample import rare, some
from tests.support.tiny import tiny_checkpoint, tiny_config

PAGE = 8
FAMILIES = {"llama": llama, "qwen3": qwen3}


@functools.cache
def model(family: str, dtype: str):
    """A decoder of one layer, its parameters with a head, and pages with anything in them."""
    config = ModelConfig.from_hf(tiny_config(family, num_hidden_layers=1))
    decoder = dataclasses.replace(config.decoder, deterministic=256)
    params = dummy(FAMILIES[family].tensors(config.decoder), dtype, seed=3)
    params.setdefault("head", Weight(params["embed"].T))
    kv = drawn.normal(jax.random.key(1), PageLayout(40, PAGE, dtype).kv(config).shape).astype(dtype)
    return decoder, params, kv


def rows_of(
    family: str, dtype: str, requests: list[tuple[int, int]], t: int, adapters: list[int] | None = None, first: int = 0
) -> list[np.ndarray]:
    """The logits of t rows of requests (number, position of the first row): each request has tokens and pages of its
    own, so a row's logits depend on the request and the row's position alone, and its adapter's number, -1 for none.
    `first`: the place of adapter 0."""
    decoder, params, kv = model(family, dtype)
    places = None if adapters is None else jnp.array([each if each < 0 else (each + first) % 4 for each in adapters])
    if places is not None:
        params = params | {"adapters": lora.stacks(params["layers"], first)}
    number, start = (jnp.array(x) for x in zip(*requests, strict=True))
    table = 1 + 8 * number[:, None] + jnp.arange(8)
    rows = Rows(start, jnp.full(len(requests), t), table, fixed=256)
    positions = rows.positions(t)
    said = (positions * 7 + number[:, None] * 31) % 200
    return np.asarray(logits_of(decoder, params, said, positions, rows, kv, places))


@functools.partial(jax.jit, static_argnums=0)
def logits_of(decoder, params, said, positions, rows, kv, places):
    return unembed(params, forward(decoder, params, said, positions, rows, kv, adapters=places).last, decoder)


@pytest.mark.parametrize("family,dtype", some([("qwen3", "bfloat16")], FAMILIES, ["float32", "bfloat16"]))
def test_a_rows_bits_depend_on_no_other_row(family, dtype):
    alone = rows_of(family, dtype, [(2, 20)], 1)[0, 0]
    beside = rows_of(family, dtype, [(0, 3), (2, 20), (1, 55), (3, 0), (2, 20)], 1)
    assert (beside[1, 0] == alone).all() and (beside[4, 0] == alone).all()
    # The first of nine rows, and rows as the last of those that write what the pages hold for the first one.
    first, after = (rows_of(family, dtype, [(0, 9), (2, start), (1, 1)], 9)[1] for start in (20, 16))
    last = rows_of(family, dtype, [(2, 16)], 5)
    assert (first[0] == alone).all() and (after[:5] == last[0]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", rare("float32")])
def test_a_rows_bits_depend_on_no_other_rows_adapter(dtype):
    """Nor on the place of its own, nor on whether others have any."""
    alone = rows_of("qwen3", dtype, [(2, 20)], 1, [1])[0, 0]
    beside = rows_of("qwen3", dtype, [(0, 3), (2, 20), (3, 20), (1, 55)], 5, [0, 1, -1, 3], first=2)
    assert (beside[1, 0] == alone).all()
    none, other = (rows_of("qwen3", dtype, [(3, 20)], 1, [place])[0, 0] for place in (-1, 1))
    assert (beside[2, 0] == none).all() and np.linalg.norm(none - other) > 0.1 * np.linalg.norm(none)


def test_hopper_s_kernels_take_rows_with_adapters():
    sizes = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4, head_dim=128)
    config = ModelConfig.from_hf(tiny_config("qwen3", num_hidden_layers=1, **sizes))
    decoder = dataclasses.replace(config.decoder, deterministic=256)
    layers = jax.eval_shape(lambda: dummy(qwen3.tensors(config.decoder), "bfloat16", 0))["layers"]
    adapted = attached(layers, jax.eval_shape(lora.stacks, layers), None)
    assert DETERMINISTIC.refuses(decoder, adapted, Call(1, 1, "bfloat16", 132, adapters=True)) is None


@pytest.mark.exhaustive  # EAGLE-3 takes features in train/test_following.py, where a text's bits are those without
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_with_features_and_without(dtype):
    """In an engine with a drafter layers' outputs are captured; and the last layer may compute one row of a block."""
    decoder, params, kv = model("qwen3", dtype)
    start = jnp.array([0, 8])
    rows = Rows(start, jnp.full(2, 8), 1 + 8 * jnp.arange(2)[:, None] + jnp.arange(8), fixed=256)
    said = rows.positions(8) * 7 % 200

    def run(capture, wanted):
        made = jax.jit(lambda p, kv: forward(decoder, p, said, rows.positions(8), rows, kv, capture, wanted))(
            params, kv
        )
        return np.asarray(made.last), np.asarray(made.cache)

    last, cache = run((), None)
    for capture, wanted in (((0,), None), ((-1, 0), jnp.array([3, 7])), ((), jnp.array([3, 7]))):
        got, written = run(capture, wanted)
        expected = last if wanted is None else last[jnp.arange(2), wanted][:, None]
        assert (got == expected).all() and (written == cache).all()


def test_slices_are_padded_and_put_together():
    rows = jnp.arange(10.0).reshape(5, 2)
    assert (sliced(lambda x: x.sum(axis=1), 2, rows) == rows.sum(axis=1)).all()


@functools.cache
def engine(**changes):
    options = dict(CROWDED, dtype="bfloat16", deterministic=True, num_draft_tokens=3) | changes
    return LLM(checkpoint(), "ngram", **options)


SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.0},
]
PROMPTS = [tokens(n) for n in (5, 64, 40, 31)] + [[*tokens(64)[:40], 9]]


def texts(llm, number: int, **settings) -> list[list[int]]:
    """All prompts, `number` at a time."""
    found = []
    for at in range(0, len(PROMPTS), number):
        some = slice(at, at + number)
        each = [SamplingParams(max_tokens=40, ignore_eos=True, **one, **settings) for one in SETTINGS[some]]
        found += [out.token_ids for out in llm.generate(PROMPTS[some], each)]
        assert all(len(text) == 40 for text in found)
    return found


def test_texts_are_the_same_whatever_happens_to_them():
    """One after the other; all at once, which preempts; with the prompts cached; without drafts; without overlap."""
    llm = engine()
    alone = texts(llm, 1)
    before = llm.engine.scheduler.preemptions
    assert texts(llm, 5) == alone
    assert llm.engine.scheduler.preemptions > before
    assert texts(llm, 3, speculative=False) == alone
    set_overlap(llm, False)
    try:
        assert texts(llm, 2) == alone
    finally:
        set_overlap(llm, True)
    idle(llm.engine)


@pytest.mark.exhaustive
@pytest.mark.parametrize("changes", [
    {"num_draft_tokens": 1},
    {"num_continuous_decode_steps": 4},
    {"chunked_prefill_size": 32, "prefill_sizes": None},
    {"disable_prefix_cache": True, "max_total_tokens": 1600},
    {"few_programs": False, "max_running_requests": 5},
], ids=str)  # fmt: skip
def test_texts_are_the_same_with_any_engine(changes):
    assert texts(engine(**changes), 5) == texts(engine(), 1)


@pytest.mark.exhaustive
def test_a_draft_model_changes_no_seeded_text():
    """It samples its drafts, and would have a say in what is accepted otherwise."""
    drafted = LLM(checkpoint(), f"standalone:{checkpoint()}", **OPTIONS | {"dtype": "bfloat16", "deterministic": True})
    assert texts(drafted, 4) == texts(engine(), 1)
    counts = drafted.engine.counts
    assert counts.accepted[0] > 0.8 * counts.drafted[0]  # drafts meet the target's own random numbers


@pytest.mark.exhaustive
def test_texts_of_adapters_are_the_same_whatever_happens_to_them(tmp_path):
    """Three adapters share two places, beside requests without one."""
    folders = lora.several(tmp_path, load_model(checkpoint(), dtype="bfloat16", progress=False), 3)
    options = OPTIONS | {"dtype": "bfloat16", "deterministic": True, "num_draft_tokens": 3}
    llm, names = LLM(checkpoint(), "ngram", lora_modules=folders, max_loras=2, **options), [None, *folders, "a0"]
    assert not {kind for kind, _ in ladder_of(llm.engine.runner.shapes)} & {"prefill", "round_greedy"}

    def said(number: int, **settings):
        found = []
        for at in range(0, len(PROMPTS), number):
            some = slice(at, at + number)
            each = [SamplingParams(max_tokens=24, ignore_eos=True, **one, **settings) for one in SETTINGS[some]]
            found += [out.token_ids for out in llm.generate(PROMPTS[some], each, lora=names[some])]
        return found

    alone = said(1)
    assert said(5) == alone == said(3, speculative=False)
    assert alone[1] != texts(engine(), 1)[1][:24]
    idle(llm.engine)


def test_a_preempted_request_starts_again_and_says_nothing_twice():
    s = make(replays=True, num_slots=2, num_pages=9, page_size=4, width=1, chunk_tokens=16, block=4)
    older, younger = (sequence(s, [i] * 9, 12) for i in range(2))
    said = {older: [], younger: []}
    for _ in range(60):
        plan = s.plan()
        assert all(chunk.start + chunk.count <= chunk.seq.prompt_len for chunk in plan.prefill)
        for seq in [*plan.first, *plan.rows]:
            if seq.status is Status.RUNNING and seq.in_flight:
                token = len(seq.tokens)
                known = s.append(seq, [token])
                said[seq] += [token][known:]
                if len(seq.tokens) == seq.limit:
                    s.finish(seq)
        audit(s)
    assert s.preemptions and younger.preemptions and s.unfinished == 0
    assert said == {older: [*range(9, 21)], younger: [*range(9, 21)]}
    assert s.cached_pages == 4  # two full pages of each prompt, and nothing of what rounds computed


def test_trees_are_refused_by_name():
    options = EngineConfig(model="m", draft="eagle:x", deterministic=True, topk=2, num_steps=2, num_draft_tokens=4)
    drafter = dataclasses.make_dataclass("Fake", [("topk", int)])(options.topk)
    draft = dataclasses.make_dataclass("Loaded", [("drafter", object)])(drafter)
    with pytest.raises(ConfigError, match="--topk"):
        prepared(None, draft, options)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_moe", "gemma3"])
def test_families_without_a_fixed_order_are_refused(family):
    with pytest.raises(ConfigError, match=r"--deterministic has no kernels for (Mixture|Attention.window)"):
        LLM(str(tiny_checkpoint(family, 272, 0, tokenizer=True)), deterministic=True, skip_warmup=True)


def test_grammars_are_refused():
    with pytest.raises(RequestError, match="--deterministic"):
        engine().generate([[5]], SamplingParams(structured=StructuredOutput(regex="a+")))
