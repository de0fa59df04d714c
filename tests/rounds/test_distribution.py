"""Sampled output has the target's distribution, whatever drafts it: invariant 1 for sampling, by chi-square.

The engine's own round program decodes two tokens for thousands of slots at once, each with a seed of its own; every
slot of a batch may have other settings. What comes out is held against `jaxspec.logits` put through the float64
reference, as is what a smaller run through `LLM` gives.
"""

from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import SamplingParams, load_model
from jaxspec.cache.paged import PageLayout
from jaxspec.cache.recurrent import NOTHING
from jaxspec.compiling import xla_options
from jaxspec.compiling.programs import Programs
from jaxspec.decoder.forward import forward, unembed
from jaxspec.decoder.functions import causal_attention
from jaxspec.decoder.mixer import OnlyAttention
from jaxspec.drafters.base import Drafter, NoDrafter, Proposal
from jaxspec.drafters.ngram import Ngram
from jaxspec.drafters.standalone import Standalone
from jaxspec.pallas.attention.kv_write import stored
from jaxspec.rounds.packing import Shapes, pack_blocks
from jaxspec.rounds.programs import ACCEPTED, DRAFTED, EMITTED, SAMPLED, TOKENS, empty_state
from jaxspec.rounds.ragged_verification import most
from jaxspec.sampling.sampling import SETTINGS as ON_DEVICE
from jaxspec.sampling.sampling import Sampled
from tests.support.exact import ALPHA, adjusted, distribution, fit_p_value, slots_for
from tests.support.tiny import tiny_checkpoint

VOCAB, STOP_ID = 12, 7
SAMPLES = 4_000  # of each drafter and setting; `make exhaustive` takes EXHAUSTIVE
EXHAUSTIVE = 100_000
LANES = 512  # slots of each setting that decode together
COMPLETIONS = 40  # of each request in the run through `LLM`
PAGE = 16

# The text repeats itself, so that n-grams are found; some of it was generated, so that penalties have what to count.
PROMPT, OUTPUT = [3, 9, 6, 5, 1], [5, 9, 4, 4, 3, 9]
KNOWN = len(PROMPT) + len(OUTPUT)

PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.5, "repetition_penalty": 1.7}
SETTINGS = {
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(temperature=1.2, top_k=4),
    "top_p": SamplingParams(temperature=0.9, top_p=0.8),
    "min_p": SamplingParams(temperature=1.1, min_p=0.15),
    "penalties": SamplingParams(**PENALTIES),
    "everything": SamplingParams(
        temperature=1.3, top_k=6, top_p=0.75, min_p=0.05, logit_bias={5: 2.5, 9: -1.0}, **PENALTIES,
        # impossible as the next token, the seventh of the output, and possible as the one after
        stop_token_ids=[STOP_ID], min_tokens=7,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class PointMass(Drafter):
    """A user's drafter: zero to two tokens that count up with the position."""

    num_draft_tokens: int = 2

    def propose(self, params, state, batch):
        tokens = (batch.length[:, None] + jnp.arange(self.num_draft_tokens) + 7) % VOCAB
        return Proposal(tokens, batch.slots % 3), state


@dataclass(frozen=True)
class Noise(Drafter):
    """A user's drafter: tokens from distributions that change with slot and position, and leave some tokens out."""

    num_draft_tokens: int = 2

    def propose(self, params, state, batch):
        at = batch.length[:, None] + jnp.arange(self.num_draft_tokens) + 1000 * batch.slots[:, None]
        logits = 3 * jnp.sin((at[..., None] * (7 + jnp.arange(VOCAB)) % 1009).astype(jnp.float32))
        chosen = [batch.choose(logits[:, step], step) for step in range(self.num_draft_tokens)]
        probs = None if batch.greedy else jnp.stack([p for _, p in chosen], axis=1)
        return Proposal(jnp.stack([token for token, _ in chosen], axis=1), batch.slots % 3, probs), state


SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


def checkpoint(seed):
    return str(tiny_checkpoint(vocab=VOCAB, seed=seed, **SMALL))


@cache
def model(seed=5):
    return load_model(checkpoint(seed), dtype="float32", progress=False)


DRAFTERS = {
    "none": lambda: (NoDrafter(), {}),
    "ngram": lambda: (Ngram(2), {}),
    "standalone": lambda: (Standalone(model(3).config, 2), model(3).params),
    "point mass": lambda: (PointMass(), {}),
    "noise": lambda: (Noise(), {}),
}


def exact(params, prompt=PROMPT, output=OUTPUT, logits=lambda tokens: jaxspec.logits(model(), tokens)):
    """The joint distribution f64[v, v] of the next two tokens, from forwards without cache, batch or engine."""
    logits = np.asarray(logits([[*prompt, *output, x] for x in range(VOCAB)]))

    def after(row, more):
        return distribution(adjusted(row, prompt, [*output, *more], params, params.stop_token_ids), params)

    first = after(logits[0, -2], [])
    return np.stack([first[x] * after(logits[x, -1], [x]) for x in range(VOCAB)])


def p_values(pairs, expected):
    """p-values of the first token alone, where a small fault shows best, and of both together."""
    return fit_p_value(pairs[:, 0], expected.sum(1)), fit_p_value(pairs, expected)


def check_fit(lanes, samples, exact=exact):
    """Check that so many samples of each setting fit `exact`. Returns them, i32[samples, 2] by setting."""
    runs = [lanes.decode(run).reshape(len(SETTINGS), LANES, 2) for run in range(-(-samples // LANES))]
    pairs = dict(zip(SETTINGS, np.concatenate(runs, axis=1), strict=True))
    found = {setting: p_values(pairs[setting], exact(params)) for setting, params in SETTINGS.items()}
    assert min(min(p) for p in found.values()) > ALPHA, found
    return pairs


class Lanes:
    """The round program over `LANES` slots for each setting, started again and again from the same text."""

    def __init__(self, name, fewer=(), kv="float32", kv_scales=None, ragged=False):
        """`fewer`: numbers of drafts, less than the drafter's, that some rounds have, `ragged`: on average. `kv`: the
        pages' dtype."""
        self.drafts = (None, *fewer)
        self.number = list(DRAFTERS).index(name)  # each drafter draws with seeds of its own
        drafter, draft_params = DRAFTERS[name]()
        config, n = model().config, LANES * len(SETTINGS)
        width, capacity = drafter.num_draft_tokens + 1, PAGE
        self.table = np.arange(1, n + 1)[:, None]  # a page each
        layout = PageLayout(n + 1, PAGE, kv)
        shapes = Shapes(
            n,
            capacity,
            1,
            block=PAGE,
            prefills=(n,),
            score=1,
            firsts=(n,),
            batches=(n,),
            seldom=(n,),
            narrower=tuple((drafts, (n,)) for drafts in fewer),
            ragged=tuple((drafts, most(drafter, drafts)) for drafts in fewer if drafts) if ragged else (),
        )
        self.programs = Programs(config, drafter, shapes, model().params, draft_params)
        some = slots_for(
            list(SETTINGS.values()),
            [PROMPT] * len(SETTINGS),
            [OUTPUT] * len(SETTINGS),
            capacity=capacity,
            new_tokens=2,
            drafts=width - 1,
            stop_ids=[params.stop_token_ids for params in SETTINGS.values()],
        )
        which = np.append(np.repeat(np.arange(len(SETTINGS)), LANES), len(SETTINGS))  # and the dummy
        slots = jax.tree.map(lambda x: np.asarray(x)[which], some)  # on the host: programs consume what they get
        # Of the 300 biases and 32 stop ids that a request may have, those that are used, which all are gone through.
        lists = {key: getattr(slots.sampling, key)[:, :2].copy() for key in ("bias_ids", "bias", "stop_ids")}
        self.slots = slots.replace(sampling=slots.sampling.replace(**lists))
        state = empty_state(config, drafter, layout, n, capacity, "float32", kv_scales=kv_scales)
        state = state.replace(slots=jax.device_put(self.slots))
        blocks = [(i, 0, KNOWN - 1, NOTHING, NOTHING) for i in range(n)]
        known = pack_blocks(blocks, [[*PROMPT, *OUTPUT]] * n, self.table, PAGE)
        compile_one = self.programs._compile

        def optimised(kind, *program):
            """Optimise more than other tests (conftest.py): so many samples take longer to run than to compile."""
            with pytest.MonkeyPatch.context() as patch:
                if kind != "prefill":  # which runs once
                    patch.setattr(xla_options, "OPTIONS", {"xla_backend_optimization_level": 1})
                return compile_one(kind, *program)

        self.programs._compile = optimised
        self.state = self.programs.prefill(state, known)
        self.drafted = self.accepted = self.whole_rounds = 0

    def decode(self, run):
        """Two tokens of each slot, i32[n, 2], with the run's own seeds."""
        n = len(self.table)
        seeds = np.column_stack([np.full(n + 1, 1000 * self.number + run), np.arange(n + 1)]).astype(np.uint32)
        slots = self.slots.replace(sampling=self.slots.sampling.replace(seed=seeds))
        self.state = self.state.replace(slots=jax.device_put(slots))
        packed = np.column_stack([np.arange(n), self.table]).astype(np.int32)
        first = self._first(packed, run)
        self.drafted += first[:, DRAFTED].sum()
        self.accepted += first[:, ACCEPTED].sum() - n
        both = first[:, EMITTED] == 2
        self.whole_rounds += both.sum()
        out = self._second(packed, run, first)  # for those with one token so far
        second = np.where(both, first[:, min(TOKENS + 1, first.shape[1] - 1)], out[:, TOKENS])
        return np.column_stack([first[:, TOKENS], second])

    def _second(self, packed, run, first):
        return self._first(packed, run + int(self.accepted))

    def _first(self, packed, turn):
        """A round whose number of drafts depends on rounds before it."""
        drafts = self.drafts[turn % len(self.drafts)]
        self.state, out = self.programs.round(self.state, packed, SAMPLED, drafts)
        return np.asarray(out)


@pytest.mark.exhaustive  # noise: test_ragged_verification.py; seeded texts with n-grams are plain ones in test_soak.py
@pytest.mark.parametrize("name", DRAFTERS)
def test_round_samples_the_target(name):
    lanes = Lanes(name)
    check_fit(lanes, SAMPLES)
    if name != "none":  # drafts of both kinds were there, and often the two tokens came out of one round
        assert lanes.drafted / 50 < lanes.accepted < lanes.drafted
        assert lanes.whole_rounds > SAMPLES / 20


@pytest.mark.exhaustive  # tests/rounds/test_ragged_verification.py has rounds of all drafts, some and none
@pytest.mark.parametrize("name", ("noise", "ngram", "standalone"))
def test_rounds_sample_the_target_however_many_drafts_they_have(name, monkeypatch):
    monkeypatch.setattr(f"{__name__}.Lanes", partial(Lanes, fewer=(0, 1)))
    test_round_samples_the_target(name)


@pytest.mark.exhaustive
def test_an_fp8_cache_samples_the_target_with_rounded_keys_and_values():
    """So coarse, and with scales so small, that unrounded ones have another distribution."""
    scales = np.array([[[2.0**-8], [2.0**-9]]], np.float32)  # of the only layer's keys and values

    def attend(cache, layer, q, k, v, *more):
        k, v = (
            np.float32(scale) * stored(x, jnp.float8_e4m3fn, 1 / scale).astype(jnp.float32)
            for x, scale in zip((k, v), scales.ravel(), strict=True)
        )
        return causal_attention(cache, layer, q, k, v, *more)

    @jax.jit
    def logits(tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return unembed(
            model().params,
            forward(model().config.decoder, model().params, tokens, positions, OnlyAttention(attend)).last,
            model().config.decoder,
        )

    rounded = partial(exact, logits=lambda tokens: logits(jnp.asarray(tokens)))
    lanes = Lanes("noise", kv="float8_e4m3fn", kv_scales=(jnp.asarray(scales),))
    pairs = check_fit(lanes, 20 * LANES, rounded)
    assert min(p_values(pairs["temperature"], exact(SETTINGS["temperature"]))) < ALPHA


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DRAFTERS)
def test_many_rounds_sample_the_target(name, monkeypatch):
    monkeypatch.setattr(f"{__name__}.SAMPLES", EXHAUSTIVE)
    test_round_samples_the_target(name)


def test_every_setting_is_among_those_that_are_sampled_with():
    """A new one fails here until `SETTINGS` turns it on, and the samples above until `exact.py` has it."""
    requests = [Sampled(params, stop_ids=params.stop_token_ids) for params in SETTINGS.values()]
    off = {name for name, each in ON_DEVICE.items() if all(each.of(one) in (each.off, []) for one in requests)}
    assert off == set(), "no case of SETTINGS turns these on"


def test_settings_can_be_told_apart():
    """The judge has power: as many samples of one setting never pass for those of another."""
    rng = np.random.default_rng(0)
    for drawn, params in SETTINGS.items():
        cells = rng.choice(VOCAB**2, SAMPLES, p=exact(params).ravel())
        pairs = np.column_stack(np.divmod(cells, VOCAB))
        for other in SETTINGS:
            fits = [p > ALPHA for p in p_values(pairs, exact(SETTINGS[other]))]
            assert all(fits) if other == drawn else not any(fits), (drawn, other)


@pytest.mark.exhaustive  # block drafters sample in test_block_drafters.py, and rounds above
@pytest.mark.parametrize("draft", ("ngram", "standalone", f"{__name__}:Noise"))
def test_llm_samples_the_target(draft):
    """Sample from end to end, requests of all settings in one batch."""
    if draft == "standalone":
        draft = f"standalone:{checkpoint(3)}"
    # Two pages hold all of the prompt but its newest token: later requests find them in the prefix tree.
    options = {
        "max_running_requests": 16,
        "context_length": 32,
        "chunked_prefill_size": 64,
        "page_size": (KNOWN - 1) // 2,
        "skip_warmup": True,
        "few_programs": True,
    }
    llm = jaxspec.LLM(checkpoint(5), draft, dtype="float32", num_draft_tokens=2, **options)
    changes = {"max_tokens": 2, "n": COMPLETIONS, "ignore_eos": True}
    params = [
        replace(setting, min_tokens=min(setting.min_tokens, 1), seed=COMPLETIONS * i, **changes)
        for i, setting in enumerate(list(SETTINGS.values()) * 10)
    ]
    outputs = llm.generate([PROMPT + OUTPUT] * len(params), params)
    pairs = [[completion.token_ids for completion in output.completions] for output in outputs]
    pairs = np.array(pairs).reshape(10, len(SETTINGS), COMPLETIONS, 2)
    for i in range(len(SETTINGS)):
        found = p_values(pairs[:, i].reshape(-1, 2), exact(params[i], PROMPT + OUTPUT, []))
        assert min(found) > ALPHA, (params[i], found)
    stats = llm.engine.stats()
    assert 0 < sum(stats["accepted_per_position"]) < sum(stats["drafted_per_position"])
