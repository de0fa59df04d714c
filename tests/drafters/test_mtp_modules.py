"""Several MTP modules: drafts in the engine are those of the formula, computed anew for each round without a cache."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import LLM, SamplingParams, load_drafter
from jaxspec.cache.mixers import WholeTexts
from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.config.engine_config import EngineConfig
from jaxspec.decoder.forward import forward
from jaxspec.drafters.base import PrefillBatch
from jaxspec.train.eagle3 import MtpObjective, Step
from jaxspec.train.objective import Batch
from tests.models.test_hybrid_models import GOLDEN
from tests.support import hybrids
from tests.support.sample import rare

MODULES, LONGEST = 3, 128
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@functools.cache
def checkpoint(family="qwen3_5"):
    """Checkpoint of a tiny hybrid, whose module becomes three that differ, and that read the one before them; or of
    MiMo-V2, which has three, and they read the target."""
    if family == "mimo_v2_flash":
        return GOLDEN / family
    source = hybrids.checkpoint(family)
    folder = source.with_name(source.name + f"-{MODULES}")
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    d = len(tensors["mtp.norm.weight"])
    tensors["mtp.fc.weight"] = np.concatenate([np.eye(d), 0.4 * np.eye(d)], axis=1).astype(np.float32)
    for name in [name for name in tensors if name.startswith("mtp.layers.0.")]:
        for j in range(1, MODULES):
            tensors[name.replace("layers.0", f"layers.{j}")] = tensors[name] * np.float32(1 - 0.15 * j)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": MODULES}))
    return folder


@functools.cache
def formula(family="qwen3_5"):
    """A function: the drafts after so many of these tokens."""
    model = jaxspec.load_model(str(checkpoint(family)), "float32", progress=False)
    options = EngineConfig(draft="mtp", num_draft_tokens=5)
    loaded = load_drafter("mtp", model, options)
    drafter, params = loaded.drafter, loaded.params

    @jax.jit
    def reads(tokens):
        batch = Batch(tokens, jnp.zeros_like(tokens), jnp.ones_like(tokens, bool))
        return forward(model.config.decoder, model.params, tokens, batch.positions, WholeTexts()).last

    @jax.jit
    def module(own, tokens, paired):
        batch = Batch(tokens, jnp.zeros_like(tokens), jnp.ones_like(tokens, bool))
        out, _ = drafter._layer(own, [], tokens, paired, Step(batch, 0))
        return drafter._feedback(own, out), drafter._logits(own, out)

    def drafts(known, count):
        text, n, logits = np.zeros((1, LONGEST), np.int32), len(known), []
        text[0, :n] = known
        feedback = paired = reads(jnp.asarray(text))
        for j in range(count):
            offset = min(j, MODULES - 1) + 1
            shifted = np.pad(text[:, offset:], ((0, 0), (0, offset)))
            row = n - 2 + j - (offset - 1)  # past the last module the chain goes on
            if j >= MODULES:
                paired = paired.at[:, row].set(feedback[:, row - 1])
            feedback, scores = module(drafter._own(params, offset - 1), jnp.asarray(shifted), paired)
            logits.append(np.asarray(scores[0, row]))
            text[0, n + j] = logits[-1].argmax()
            if j < MODULES - 1:
                paired = feedback
        return text[0, n : n + count].tolist(), np.stack(logits)

    return model, loaded, drafts


@pytest.mark.exhaustive  # three modules' drafts are transformers' in test_hybrid_models.py (MiMo-V2)
@pytest.mark.parametrize("length", [1, 2, 3, 33])
def test_proposed_drafts_are_the_formulas(length):
    model, loaded, drafts = formula()
    prompt = np.random.default_rng(length).integers(3, 64, length).tolist()
    prop = jaxspec.propose(model, loaded, prompt, 5)
    tokens, logits = drafts([*prompt, int(prop.next_token)], 5)
    assert prop.tokens.tolist() == tokens
    np.testing.assert_allclose(prop.logits, logits, atol=2e-4)


@pytest.mark.exhaustive  # of one module, train/test_objectives.py does
def test_training_unrolls_what_serving_drafts():
    """Five steps: three modules, and two more of the last one's chain."""
    model, loaded, drafts = formula()
    prompt = np.random.default_rng(3).integers(3, 64, 30).tolist()
    tokens, expected = drafts(prompt, 5)
    text = jnp.asarray([prompt + tokens])
    batch = Batch(text, jnp.zeros_like(text), jnp.ones_like(text, bool))
    last = forward(model.config.decoder, model.params, text, batch.positions, WholeTexts()).last
    objective = MtpObjective(loaded.drafter, model.config, "float32", "soft", steps=5)
    outputs = objective._unroll(loaded.params, (last,), batch)
    got = [loaded.drafter._logits(loaded.params, out[0, len(prompt) - 2]) for out in outputs]
    np.testing.assert_allclose(got, expected, atol=2e-4)


SPLITS = {
    "one call": [[(0, 40)]],
    "two blocks of a call": [[(0, 17), (17, 40)]],
    "three, in another order": [[(30, 40), (0, 16), (16, 30)]],
    "call by call": [[(0, 2)], [(2, 3)], [(3, 30)], [(30, 40)]],
    "behind pages that are shared": [[(0, 40)], "another", [(16, 17)], [(17, 18)], [(18, 25), (25, 40)]],
}


@pytest.mark.parametrize("family,split", [
    rare("qwen3_5", "three, in another order"), ("qwen3_5", "behind pages that are shared"),
    *(pytest.param("qwen3_5", name, marks=pytest.mark.exhaustive) for name in ("two blocks of a call", "call by call")),
    ("mimo_v2_flash", "behind pages that are shared"), rare("mimo_v2_flash", "three, in another order"),
])  # fmt: skip
def test_rows_are_the_same_however_the_text_comes(family, split):
    """Keys and values of every module, and what is kept of each. Of shared pages nothing is written again."""
    drafter, params = formula(family)[1].drafter, formula(family)[1].params
    rng = np.random.default_rng(0)
    tokens, features = rng.integers(0, 64, 41), rng.standard_normal((40, drafter.config.hidden_size), np.float32)
    table, prefill = np.arange(1, 9), jax.jit(drafter.prefill)
    blocks = max(len(call) for call in SPLITS[split])

    def run(calls):
        state, slot = drafter.init_state(PageLayout(9, 8, "float32"), 3), 0
        for call in calls:
            if call == "another":
                state, slot = {**state, "hidden": tuple(x + 7 for x in state["hidden"])}, 1
                continue
            call = call + [(0, 0)] * (blocks - len(call))  # padding, as in an engine's program
            fill = lambda x, call=call: np.stack([np.resize(x[begin:end], (40, *x.shape[1:])) for begin, end in call])  # noqa: E731
            starts, ends = np.array(call).T
            rows = Rows(starts, ends - starts, np.where(ends[:, None], table, 0))
            batch = PrefillBatch(np.where(ends, slot, 2), fill(tokens[:-1]), fill(tokens[1:]), rows)
            state = prefill(params, state, jax.tree.map(jnp.asarray, batch), (jnp.asarray(fill(features)),))
        return state, slot

    (expected, _), (state, slot) = run(SPLITS["one call"]), run(SPLITS[split])
    for j in range(MODULES):
        filled = [
            np.asarray(kv[j][0, 1:]).swapaxes(1, 3).reshape(64, -1)[: 40 - j] for kv in (state["kv"], expected["kv"])
        ]
        np.testing.assert_allclose(*filled, atol=1e-4)
        np.testing.assert_allclose(state["hidden"][j][slot], expected["hidden"][j][0], atol=1e-4)


def rounds(text, prompt_length, drafts, count):
    """Verify rounds that a text takes if each drafts by the formula, and the tokens that they give."""
    at, taken = prompt_length + 1, 0  # the first token is no round's
    while at < len(text):
        guesses, _ = drafts(text[:at], count)
        right = 0
        while right < count and at + right < len(text) and guesses[right] == text[at + right]:
            right += 1
        at, taken = at + right + 1, taken + 1
    return taken


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [2, 5])
def test_rounds_of_the_engine_are_the_formulas(count):
    """With prompts in chunks, several requests at a time, and prefixes that are shared the second time."""
    _, _, drafts = formula()
    folder = str(checkpoint())
    options = {"context_length": LONGEST, "page_size": 8, "chunked_prefill_size": 32, "max_running_requests": 2,
               "dtype": "float32", "skip_warmup": True, "few_programs": True}  # fmt: skip
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 64, n).tolist() for n in (1, 2, 18, 70)]
    plain = LLM(folder, "none", **options).generate(prompts, GREEDY)
    llm = LLM(folder, "mtp", num_draft_tokens=count, draft_policy="fixed", **options)
    for again in (False, True):
        outs = llm.generate(prompts, GREEDY)
        assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
        for prompt, out in zip(prompts, outs, strict=True):
            expected = rounds(prompt + out.token_ids, len(prompt), drafts, count)
            assert out.metrics.verify_rounds == expected
        assert any(out.metrics.cached_tokens for out in outs) == again
    assert sum(out.metrics.verified_tokens for out in outs) > 1.15 * sum(out.metrics.verify_rounds for out in outs)
