"""DFlash's descendants in the engine: greedy text is plain decoding's, sampled text has the target's distribution.

A random drafter is hardly ever right about a random target, so `Watching` puts right drafts among its own.
"""

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import jaxspec
from jaxspec import EngineConfig, SamplingParams, load_drafter
from jaxspec.drafters.blocks.dflash2 import DFlash2
from jaxspec.drafters.blocks.domino import Domino
from jaxspec.drafters.blocks.dspark import DSpark
from jaxspec.drafters.blocks.lilicorr import LiLiCorr
from tests.rounds import test_distribution as sampled
from tests.support import engines
from tests.support.blocks import Watching, cold_drafts, write_drafter
from tests.support.sample import rare

MARKOV = dict(
    architectures=["Qwen3DSparkModel"], markov_rank=8, enable_confidence_head=True, confidence_head_with_markov=True
)
SELECTOR = dict(
    architectures=["DFlash2DraftModel"], conv_kernel_size=2, conv_group_size=8, selector_rank=8, selector_top_k=6,
    layer_types=["sliding_attention"] * 2, use_sliding_window=True, sliding_window=21, is_causal=False,
)  # fmt: skip
GRU = dict(architectures=["DominoDraftModel"], emb_dim=8, gru_hidden_dim=12, pure_draft_prefix_len=1, shift_label=True)
LATTICE = dict(
    architectures=["LiLiCorrDraftModel"], conv_kernel_size=2, conv_group_size=8, lilicorr_candidate_topk=6,
    lilicorr_hidden_size=0, lilicorr_num_layers=1, lilicorr_num_heads=2, lilicorr_mlp_ratio=2.0, lilicorr_factor_dim=8,
    lilicorr_vector_eps=1e-6, lilicorr_logit_scale=10.0,
)  # fmt: skip
KINDS = {
    "dspark": (DSpark, MARKOV, "?confidence=0.3"), "dflash2": (DFlash2, SELECTOR, ""), "domino": (Domino, GRU, ""),
    "lilicorr": (LiLiCorr, LATTICE, "?window=21"),
}  # fmt: skip
_root = tempfile.TemporaryDirectory(prefix="jaxspec-blocks-")


class Loading(Watching):
    @classmethod
    def load(cls, target, source, options):
        method = cls.__name__.lower().removeprefix("watched")
        drafter, params = super().load(target, folder(method), options)
        return drafter, {**params, **expected_drafts(method)}


@dataclass(frozen=True)
class WatchedDSpark(Loading, DSpark):
    pass


@dataclass(frozen=True)
class WatchedDFlash2(Loading, DFlash2):
    pass


@dataclass(frozen=True)
class WatchedDomino(Loading, Domino):
    pass


@dataclass(frozen=True)
class WatchedLiLiCorr(Loading, LiLiCorr):
    pass


@functools.cache
def folder(method):
    kind, settings, _ = KINDS[method]
    return write_drafter(kind, Path(_root.name) / method, engines.checkpoint(), **settings)


@functools.cache
def requests():
    """Prompts that preempt each other, and prompts that share pages; each with greedy settings."""
    shared = engines.tokens(70, 5)
    long = [(engines.tokens(n), 64) for n in (29, 40, 41, 50)]
    prefixes = [(shared[:n] + engines.tokens(k, 6), 16) for n, k in ((70, 1), (70, 9), (64, 3), (33, 0))]
    return {
        name: [(prompt, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n)) for prompt, n in each]
        for name, each in (("long", long), ("prefixes", prefixes))
    }


def run(llm, name):
    prompts, params = zip(*requests()[name], strict=True)
    return llm.generate(list(prompts), list(params))


@functools.cache
def plain(name):
    return run(engines.engine("none"), name)


@functools.cache
def expected_drafts(method):
    outs = [out for name in requests() for out in plain(name)]
    known = [out.prompt_token_ids + out.token_ids for out in outs]
    texts = np.array([text + [0] * (engines.CONTEXT - len(text)) for text in known], np.int32)
    model = engines.engine("none").engine.runner.model
    loaded = load_drafter(f"{method}:{folder(method)}{KINDS[method][2]}", model)
    return cold_drafts(model, loaded, texts, np.array([len(text) for text in known]))


@pytest.mark.parametrize("method,watched", [
    rare("dspark", "WatchedDSpark"), rare("dflash2", "WatchedDFlash2"), rare("domino", "WatchedDomino"),
    ("lilicorr", "WatchedLiLiCorr"),
])  # fmt: skip
def test_greedy_output_equals_plain_and_drafts_are_a_cold_starts(method, watched):
    """Chunked prompts, prefix hits, preemption: the text is plain decoding's, the drafter's cache is whole."""
    llm = jaxspec.LLM(engines.checkpoint(), f"{__name__}:{watched}{KINDS[method][2]}", **engines.OPTIONS)
    engines.set_rounds(llm, 1)
    for name in requests():
        runs = [run(llm, name) for _ in range(2 if name == "prefixes" else 1)]
        for outs in runs:
            for out, want in zip(outs, plain(name), strict=True):
                assert out.token_ids == want.token_ids, f"{name}, prompt of {len(out.prompt_token_ids)}"
        cached = [sum(out.metrics.cached_tokens for out in outs) for outs in runs]
        assert name == "long" or cached[1] > cached[0], "the second time all begin in the cache"
        if name == "long":
            assert sum(out.metrics.preemptions for out in outs) > 0
            rounds = sum(out.metrics.verify_rounds for out in outs)
            assert 1.3 < sum(out.metrics.verified_tokens for out in outs) / rounds < 4.5
            drafted = sum(llm.engine.stats()["drafted_per_position"])
            most = rounds * (5 if method in ("dspark", "domino") else 4)
            assert (0.2 * most < drafted < 0.9 * most) == (method == "dspark")  # confidence ends some drafts early
    state = llm.engine.runner.state.draft
    assert int(state["wrong"]) == 0 and int(state["right"]) > 400, (state["right"], state["wrong"])
    if method == "lilicorr":
        kv, runner = state["kv"]["kv"], llm.engine.runner
        slots, pages, size = kv.shape[1], kv.shape[2], kv.shape[5]
        assert slots == llm.engine.config.max_running_requests + 1 and 21 <= pages * size <= 21 + 2 * 5 + 2 * size
        assert runner.draft.drafter.kv_bytes_per_token("float32") == 0
        assert kv.nbytes < runner.plan.slot_bytes and "the drafter's newest 26 tokens" in str(runner.plan)


@pytest.mark.parametrize("method", [rare("dspark"), "dflash2", rare("domino"), rare("lilicorr")])
def test_sampled_output_has_the_targets_distribution(method, monkeypatch, tmp_path):
    """Draft with DSpark along the chain, from nine of the twelve tokens, ended by confidence; with DFlash 2 and Domino,
    from a token map."""
    kind, settings, options = KINDS[method]
    more = {
        "dspark": {"draft_vocab_size": 9}, "dflash2": {"selector_top_k": 4}, "lilicorr": {"lilicorr_candidate_topk": 4},
    }.get(method, {})  # fmt: skip
    source = write_drafter(kind, tmp_path, sampled.checkpoint(5), 3, **settings | more | SMALL)
    draft = f"{method}:{source}{options}"
    (tmp_path / "map.json").write_text("[0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11]")
    token_map = str(tmp_path / "map.json") if method in ("dflash2", "domino") else None
    options = EngineConfig(draft=draft, num_draft_tokens=2, draft_token_map=token_map)
    loaded = load_drafter(draft, sampled.model(), options)
    monkeypatch.setitem(sampled.DRAFTERS, method, lambda: (loaded.drafter, loaded.params))
    lanes, samples = sampled.Lanes(method), 5_000
    sampled.check_fit(lanes, samples)
    assert lanes.drafted / 20 < lanes.accepted < lanes.drafted and lanes.whole_rounds > samples / 20


SMALL = dict(num_hidden_layers=1, layer_types=None, use_sliding_window=False, num_attention_heads=2, head_dim=8)
