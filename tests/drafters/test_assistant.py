"""Gemma 4's assistants: drafts equal transformers' (tests/golden/assistants), and texts stay the target's own."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import LLM, CheckpointError, ConfigError, SamplingParams
from jaxspec.config.engine_config import EngineConfig
from tests.support.engines import PAGE, SMALL, check_greedy
from tests.support.sample import rare

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
ASSISTANTS = {"dense": "gemma4-tied", "ordered": "gemma4-inputs"}
LENGTHS, DRAFTS = (7, 33, 150), 4  # the window is 20 positions


def target(name):
    return str(GOLDEN / "checkpoints" / ASSISTANTS[name])


def assistant(name):
    return GOLDEN / "assistants" / name


@pytest.mark.parametrize("name,length,drafts", [
    ("ordered", 33, 2), *(rare(*pair, DRAFTS) for pair in itertools.product(ASSISTANTS, LENGTHS))
])  # fmt: skip
def test_drafts_match_transformers(name, length, drafts):
    """The first from the target's hidden state, later ones from the assistant's own; with centroids, of few tokens."""
    model = jaxspec.load_model(target(name), progress=False)
    drafter = jaxspec.load_drafter(f"assistant:{assistant(name)}", model)
    prompts = load_file(GOLDEN / "expected" / f"{ASSISTANTS[name]}.safetensors")
    expected = load_file(assistant(name) / "expected.safetensors")
    prop = jaxspec.propose(model, drafter, prompts[f"ids_{length}"].tolist(), drafts)
    assert prop.next_token == expected[f"next_{length}"]
    assert prop.tokens.tolist() == expected[f"drafts_{length}"][:drafts].tolist()
    logits = expected[f"logits_{length}"][:drafts]
    scored = prop.logits > -np.inf
    assert (scored.sum(axis=1) == (64 if name == "dense" else 5 * 64 // 16)).all()
    np.testing.assert_allclose(prop.logits[0][scored[0]], logits[0][scored[0]], rtol=0, atol=5e-4)
    # Noise, fed back three times.
    np.testing.assert_allclose(prop.logits[scored], logits[scored], rtol=0, atol=5e-3)
    assert all((row[~known] < row[known].min()).all() for row, known in zip(logits, scored, strict=True))


@pytest.mark.exhaustive
def test_a_text_that_goes_on_keeps_the_targets_last_state():
    """The drafts after a text, each of whose tokens was accepted by itself, are those after a prompt of it."""
    model = jaxspec.load_model(target("ordered"), progress=False)
    drafter = jaxspec.load_drafter(f"assistant:{assistant('ordered')}", model)
    prompt = load_file(GOLDEN / "expected" / "gemma4-inputs.safetensors")["ids_33"]
    expected = load_file(assistant("ordered") / "expected.safetensors")
    text = [*prompt.tolist(), int(expected["next_33"][0])]
    along = jaxspec.propose_along(model, drafter, [text], DRAFTS, start=25)
    assert along.tokens[0, -1].tolist() == expected["drafts_33"].tolist()


@pytest.mark.parametrize("draft", [
    "assistant:{}", pytest.param("suffix+assistant:{}", marks=pytest.mark.exhaustive),
])  # fmt: skip
@pytest.mark.parametrize("name", ["ordered", pytest.param("dense", marks=pytest.mark.exhaustive)])
def test_texts_are_the_targets_own_cached_or_cold(name, draft):
    llm = LLM(target(name), draft.format(assistant(name)), num_draft_tokens=3, **OPTIONS)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 64, n).tolist() for n in (1, 7, 33, 150)]
    cached = check_greedy(llm, prompts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    assert cached[-1].metrics.cached_tokens >= 150 - 1 - PAGE
    stats = llm.engine.stats()
    assert sum(stats["accepted_per_position"]) < sum(stats["drafted_per_position"])


OPTIONS = SMALL | {"dtype": "float32", "max_running_requests": 4}


def changed(tmp_path, text=None, **keys):
    folder = shutil.copytree(assistant("dense"), tmp_path / "assistant")
    hf = json.loads((folder / "config.json").read_text()) | keys
    hf["text_config"] |= text or {}
    (folder / "config.json").write_text(json.dumps(hf))
    return folder


@pytest.mark.parametrize("keys,words", [
    ({"backbone_hidden_size": 64}, "backbone_hidden_size is 64, the target's 48"),
    ({"text": {"vocab_size": 128}}, "vocab_size is 128, the target's 64"),
    ({"text": {"num_key_value_heads": 4}}, "read 4 KV heads of width 16; the target's layers of their kind have"),
    ({"text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}}, "experts"),
    ({"text": {"model_type": "llama"}}, "text_config has model_type 'llama'"),
    ({"use_ordered_embeddings": True, "num_centroids": 7}, "num_centroids .7. must divide the vocabulary of 64"),
    ({"model_type": "llama"}, "an assistant is a folder whose model_type is gemma4_assistant"),
])  # fmt: skip
def test_assistants_of_other_models_are_refused(keys, words, tmp_path):
    model = jaxspec.load_model(target("dense"), progress=False)
    with pytest.raises(ConfigError, match=words):
        jaxspec.load_drafter(f"assistant:{changed(tmp_path, **keys)}", model)


def test_an_assistants_checkpoint_names_what_it_lacks(tmp_path):
    model = jaxspec.load_model(target("ordered"), progress=False)
    folder = shutil.copytree(assistant("ordered"), tmp_path / "assistant")
    tensors = load_file(folder / "model.safetensors")
    order = tensors.pop("masked_embedding.token_ordering")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="missing masked_embedding"):
        jaxspec.load_drafter(str(folder), model)  # whose config says what it is
    save_file(tensors | {"masked_embedding.token_ordering": np.minimum(order, 62)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="must have each of 64 tokens once"):
        jaxspec.load_drafter(str(folder), model)


def test_other_targets_are_refused():
    other = jaxspec.load_model(str(GOLDEN / "checkpoints" / "gemma3-tied"), progress=False)
    with pytest.raises(ConfigError, match="an assistant of Gemma 4; the target is a gemma3"):
        jaxspec.load_drafter(f"assistant:{assistant('dense')}", other)
    model = jaxspec.load_model(target("ordered"), progress=False)
    options = EngineConfig(draft="assistant", num_draft_tokens=2)
    drafter = jaxspec.load_drafter(f"assistant:{assistant('ordered')}", model, options).drafter
    assert drafter.num_draft_tokens == 2 and drafter.sources == ((0, 0), (0, 0), (1, 0))
