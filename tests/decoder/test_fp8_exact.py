"""With FP8 weights drafts change nothing either: greedy text, a seed's text, cached prefixes, the distribution.

Weights are quantised while they load, the drafter's too. Widths are below a block of 128, so that scales are of parts
of one. Plain text is held against `jaxspec.logits` of the same FP8 model.
"""

import dataclasses
import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, SamplingParams, load_model
from jaxspec.scheduling.audit import audit
from tests.drafters import test_block_drafters as blocks
from tests.drafters import test_dflash as dflash
from tests.drafters import test_eagle as eagle
from tests.drafters import test_eagle_trees as eagle_trees
from tests.engine import test_hybrid as hybrid
from tests.engine import test_lossless as lossless
from tests.rounds import test_distribution as distribution
from tests.support import heads
from tests.support.blocks import write_drafter
from tests.support.sample import rare

PAGE, CONTEXT = lossless.OPTIONS["page_size"], lossless.OPTIONS["context_length"]
GUESS = f"{lossless.__name__}:Guess"
WITHOUT_WEIGHTS = ("none", "ngram", "suffix", GUESS)
DRAFTS = ("ngram", "suffix", GUESS, "standalone:self", "standalone:noisy", "eagle", "eagle3", "tree", "dflash",
          "dspark", "dflash2")  # fmt: skip
_root = tempfile.TemporaryDirectory(prefix="jaxspec-fp8-")


def cases(drafts, often):
    """Each drafter with both ways to multiply, of which `make test` takes `often`."""
    every = [(draft, activations) for draft in drafts for activations in ("off", "on")]
    return [pytest.param(*case, marks=() if case in often else pytest.mark.exhaustive) for case in every]


def drafter(name, target):
    """Value of --draft for a name in `DRAFTS`."""
    method, _, which = name.partition(":")
    if method == "standalone":
        return f"standalone:{lossless.draft_folder('qwen3', which)}"
    if name in ("eagle", "tree"):
        return str(heads.mimic(target))
    if name == "eagle3":
        return str(heads.random_eagle3(target, tuple(range(60, 90)), (0, 0, 0)))
    if name == "dflash":
        return dflash.drafter_folder(target, 12)
    if name in blocks.KINDS:
        kind, settings, options = blocks.KINDS[name]
        return f"{name}:{write_drafter(kind, Path(_root.name) / name, target, **settings)}{options}"
    return name


@functools.cache
def engine(draft, activations, fresh=0):
    """`fresh` tells engines apart that are made alike."""
    target = lossless.checkpoint("qwen3")
    options = lossless.OPTIONS | {"quantization": "fp8", "fp8_activations": activations}
    if draft == "tree":
        options |= {"topk": 3, "num_steps": 3, "num_draft_tokens": 12}
    elif draft not in ("none", *blocks.KINDS, "dflash"):
        options["num_draft_tokens"] = 3
    if draft not in WITHOUT_WEIGHTS:
        options["draft_quantization"] = "fp8"
    llm = LLM(str(target), drafter(draft, target), **options)
    llm.engine.scheduler.rounds = 1
    return llm


@functools.cache
def requests():
    """Batches by name: lengths at the edges of page, block and program; some that preempt each other; one prefix."""
    rng = np.random.default_rng(8)
    prompt = lambda n: rng.integers(0, 256, n).tolist()  # noqa: E731
    greedy = functools.partial(SamplingParams, temperature=0.0, ignore_eos=True)
    shared = prompt(70)
    return {
        "edges": [(prompt(n), greedy(max_tokens=9)) for n in (1, 7, 8, 9, 31, 33, 63, 65, 97)],
        "preempted": [(prompt(n), greedy(max_tokens=64)) for n in (29, 40, 41, 50)],
        "prefixes": [(shared[:n] + prompt(k), greedy(max_tokens=16)) for n, k in ((70, 1), (70, 9), (64, 3), (33, 0))],
    }


@functools.cache
def plain(activations):
    llm = engine("none", activations)
    return {name: [out.token_ids for out in lossless.run(llm, batch)] for name, batch in requests().items()}


@pytest.mark.parametrize("activations", [rare("off"), "on"])
def test_plain_text_is_the_argmax_of_the_fp8_models_logits(activations):
    model = engine("none", activations).engine.runner.model
    assert model.params["layers"][0]["qkv"].format.activations == (activations == "on")
    for name, texts in plain(activations).items():
        for (prompt, _), text in zip(requests()[name], texts, strict=True):
            row = (prompt + text)[:CONTEXT]
            padded = row + [0] * (CONTEXT - len(row))
            logits = np.asarray(jaxspec.logits(model, [padded])[0, len(prompt) - 1 : len(row) - 1])
            assert np.all(logits[np.arange(len(text)), text] >= logits.max(-1) - 1e-4)


OFTEN = {}  # an FP8 cache's drafts are in ../checkpoint/test_quantisation.py


@pytest.mark.parametrize("draft,activations", cases(DRAFTS, OFTEN))
def test_greedy_text_is_plain_decodings(draft, activations, monkeypatch):
    """Cold and from the cache, with overlap and without, one round in a program and, but for what runs often, four."""
    llm, expected = engine(draft, activations), plain(activations)
    before = llm.engine.stats()
    for overlap, rounds in ((True, 1), (False, 1 if (draft, activations) in OFTEN else 4)):
        monkeypatch.setattr(llm.engine, "config", dataclasses.replace(llm.engine.config, disable_overlap=not overlap))
        monkeypatch.setattr(llm.engine.scheduler, "rounds", rounds)
        for name, batch in requests().items():
            assert llm.engine.flush_cache()
            cold, cached = lossless.run(llm, batch), lossless.run(llm, batch)
            for outs in (cold, cached):
                assert [out.token_ids for out in outs] == expected[name], name
            if name == "prefixes":
                assert all(out.metrics.cached_tokens >= len(out.prompt_token_ids) - 1 - PAGE for out in cached)
        audit(llm.engine.scheduler)
    after = llm.engine.stats()
    assert after["preemptions_total"] > before["preemptions_total"]
    if draft == "standalone:self":  # quantised as the target is, but for the copy of its head
        assert after["accepted_per_position"][-1] > 0.85 * after["drafted_per_position"][-1]
    if draft in ("standalone:noisy", "eagle", "tree"):
        assert after["accepted_per_position"][0] > before["accepted_per_position"][0] + 50


@pytest.mark.parametrize("draft,activations", cases(("none", *DRAFTS), set()))
def test_a_seed_says_the_same_twice(draft, activations, monkeypatch):
    """In a batch that preempts, again without overlap, and of an engine that was made anew."""
    batch = [
        (prompt, dataclasses.replace(params, temperature=1.0, seed=i))
        for i, (prompt, params) in enumerate(requests()["preempted"])
    ]
    said = []
    for fresh, overlap in ((0, True), (0, False), (1, True)):
        llm = engine(draft, activations, fresh)
        assert llm.engine.flush_cache()
        monkeypatch.setattr(llm.engine, "config", dataclasses.replace(llm.engine.config, disable_overlap=not overlap))
        outs = lossless.run(llm, batch)
        assert sum(out.metrics.preemptions for out in outs)
        said.append([out.token_ids for out in outs])
    assert said[0] == said[1] == said[2]
    assert said[0] != plain(activations)["preempted"]


# -- sampling ----------------------------------------------------------------------------------------------------------


@functools.cache
def fp8_model(seed=5, *, activations):
    checkpoint = distribution.checkpoint(seed)
    return load_model(
        checkpoint, dtype="float32", progress=False, quantization="fp8", fp8_activations=activations == "on"
    )


SAMPLED = (*distribution.DRAFTERS, "eagle", "eagle3", "tree", "dflash", "dspark", "dflash2")


@pytest.mark.parametrize("draft,activations", cases(SAMPLED, set()))
def test_rounds_sample_the_target(draft, activations, monkeypatch, tmp_path):
    """Run the tests of unquantised weights; both the rounds and their reference have the FP8 model."""
    monkeypatch.setattr(distribution, "model", functools.partial(fp8_model, activations=activations))
    monkeypatch.setattr(distribution, "SAMPLES", 3_000)
    if draft in distribution.DRAFTERS:
        distribution.test_round_samples_the_target(draft)
    elif draft == "tree":
        eagle_trees.test_rounds_sample_the_target(monkeypatch)
    elif draft == "dflash":
        folder = dflash.drafter_folder  # the seed: test_dflash.py has written one of its own
        monkeypatch.setattr(dflash, "drafter_folder", lambda target, seed, **more: folder(target, seed + 37, **more))
        dflash.test_sampled_output_has_the_targets_distribution(monkeypatch)
    elif draft in blocks.KINDS:
        blocks.test_sampled_output_has_the_targets_distribution(draft, monkeypatch, tmp_path)
    else:
        eagle.test_rounds_sample_the_target(draft, monkeypatch)


# -- hybrids -----------------------------------------------------------------------------------------------------------


unquantised_engine = hybrid.engine.__wrapped__


@functools.cache
def hybrid_engine(family, draft, *, activations):
    with pytest.MonkeyPatch.context() as patch:
        options = hybrid.OPTIONS | {"quantization": "fp8", "fp8_activations": activations}
        patch.setattr(hybrid, "OPTIONS", options)
        return unquantised_engine(family, draft)


@pytest.mark.exhaustive
@pytest.mark.parametrize("activations", ["off", "on"])
@pytest.mark.parametrize("family", hybrid.hybrids.FAMILIES)
def test_hybrids_with_their_modules(family, activations, monkeypatch):
    """Greedy text by forwards over the whole of it, cached prefixes and snapshots, and the distribution.

    With quantised activations, the last bits of a state that was computed in other steps may round an activation to
    another number. That moves logits by some hundredths, so texts that come near a tie aren't compared.
    """
    load = functools.partial(load_model, quantization="fp8", fp8_activations=activations == "on")
    monkeypatch.setattr(hybrid, "engine", functools.partial(hybrid_engine, activations=activations))
    monkeypatch.setattr(hybrid, "load_model", load)
    if activations == "off":
        hybrid.test_greedy_texts_are_plain_decodings(family, "mtp")
        hybrid.test_cached_prefixes_continue_as_cold_ones(family, "mtp", 100)
    hybrid.test_rounds_sample_the_target(family, "mtp", monkeypatch)
