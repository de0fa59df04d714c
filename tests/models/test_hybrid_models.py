"""Models with an MTP module against transformers (tests/golden/hybrid): logits, greedy texts, chains, every layout."""

import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import LLM, CheckpointError, ConfigError, EngineConfig, SamplingParams, load_drafter
from jaxspec.cache.mixers import WholeTexts
from jaxspec.checkpoint import mtp_name
from jaxspec.decoder.forward import forward, unembed
from jaxspec.drafters import mtp
from jaxspec.models.weights import is_param
from tests.support.sample import rare
from tests.support.tiny import rewrite, tiny_config

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "hybrid"
VARIANTS = sorted(path.stem for path in GOLDEN.glob("*.npz"))
# Qwen3-Next has the mixture, Kimi K2 one group, and a hybrid with experts what the dense one has. Seven are in
# test_models.py, without their modules; a text model has its whole one's layers.
SECOND = {"granitemoehybrid-dense", "kimi_linear-one-group", "qwen3_5_moe-text"}
SECOND |= {"bailing_moe", "ernie4_5_moe", "exaone_moe", "hy_v3", "deepseek_v3", "glm4_moe", "mimo_v2_flash"}
SECOND |= {"qwen3_5-text-tied", "qwen4_exp-text-tied", "qwen3_5_moe", "nemotron_h-latent"}
LENGTHS = (1, 7, 33, 150)
NO_MODULES = ("granitemoehybrid", "kimi_linear", "qwen4_exp-text")
MODULES = [name for name in VARIANTS if not name.startswith(NO_MODULES)]  # which have an MTP module
CHAINS = (1, 2, 7, 33, 150)  # the prompts after which they have drafts
SHORTER = ("glm4_moe", 33)  # whose one module drafts from the target's output, then from its own
PROMPTS = (1, 7, 33, 64)  # whose continuations the goldens have
CLOSE = dict(rtol=0, atol=2e-3)  # float32 noise of these models is about 1e-4


@functools.cache
def golden(variant):
    return jaxspec.load_model(str(GOLDEN / variant), dtype="float32", progress=False), np.load(
        GOLDEN / f"{variant}.npz"
    )


@functools.cache
def drafter(variant):
    return load_drafter("mtp", golden(variant)[0])


def each_variant_with(values, often, variants=VARIANTS):
    """All pairs, of which `make test` runs those in `often`."""
    pairs = [(variant, value) for variant in variants for value in values if value != "mtp" or variant in MODULES]
    return [pytest.param(*pair, marks=() if pair in often else pytest.mark.exhaustive) for pair in pairs]


@pytest.mark.parametrize("variant", [rare(each) if each in SECOND else each for each in VARIANTS])
def test_logits_and_greedy_texts_are_transformers(variant):
    """One forward over the longest prompt, and over others with their expected continuations behind them, gives the
    logits after every token and every greedy choice."""
    model, expected = golden(variant)
    texts = [np.append(expected["ids"][:n], text) for n, text in zip(PROMPTS, expected["greedy"], strict=True)]
    padded = np.stack([np.pad(text, (0, max(LENGTHS) - len(text))) for text in [expected["ids"], *texts]])
    logits, *others = np.asarray(jaxspec.logits(model, padded))
    np.testing.assert_allclose(logits, expected["logits"], **CLOSE)
    for n, text, row in zip(PROMPTS, expected["greedy"], others, strict=True):
        assert row[n - 1 : n - 1 + len(text)].argmax(-1).tolist() == text.tolist()


@pytest.mark.exhaustive  # engines take a prompt's last row alone, with states and without
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_wanted_row_is_what_it_is_among_all(variant):
    model, expected = golden(variant)
    tokens, wanted = np.stack([expected["ids"]] * 3), np.array([149, 0, 70])
    positions = np.broadcast_to(np.arange(150), tokens.shape)
    run = jax.jit(lambda params: forward(
        model.config.decoder, params, tokens, positions, WholeTexts(), None, (), wanted
    ).last)  # fmt: skip
    last = run(model.params)
    assert last.shape == (3, 1, model.config.hidden_size)
    np.testing.assert_allclose(
        unembed(model.params, last, model.config.decoder)[:, 0], expected["logits"][wanted], **CLOSE
    )


@pytest.mark.parametrize("variant,length", each_variant_with(
    LENGTHS, often=[]
))  # fmt: skip
def test_logits_match_transformers_at_any_length(variant, length):
    model, expected = golden(variant)
    logits = jaxspec.logits(model, expected["ids"][None, :length])
    np.testing.assert_allclose(logits[0], expected["logits"][:length], **CLOSE)


@pytest.mark.parametrize("variant,draft", each_variant_with(("none", "ngram", "mtp"), often=[]))
def test_the_engines_greedy_texts_are_transformers(variant, draft):
    """Serve four requests: prompts of one token to more than one program's, states in slots, drafts refused."""
    _, expected = golden(variant)
    drafts = {} if draft == "none" else {"num_draft_tokens": 3}
    options = {"context_length": 128, "page_size": 8, "chunked_prefill_size": 32, "max_running_requests": 2}
    llm = LLM(str(GOLDEN / variant), draft, dtype="float32", skip_warmup=True, few_programs=True, **options, **drafts)
    prompts = [expected["ids"][:n].tolist() for n in PROMPTS]
    outs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True))
    assert [out.token_ids for out in outs] == expected["greedy"].tolist()


@pytest.mark.parametrize("variant,length", each_variant_with(
    CHAINS,
    often=[SHORTER, ("mimo_v2_flash", 2)],  # of the others test_mtp_layouts.py has the engine's drafts
    variants=MODULES,
))  # fmt: skip
def test_chains_are_those_of_transformers_mtp_module(variant, length):
    model, expected = golden(variant)
    row, drafts = CHAINS.index(length), 2 if (variant, length) == SHORTER else 3
    prop = jaxspec.propose(model, drafter(variant), expected["ids"][:length].tolist(), drafts)
    assert prop.next_token == expected["next"][row] and prop.count == drafts
    assert prop.tokens.tolist() == expected["drafts"][row][:drafts].tolist()
    np.testing.assert_allclose(prop.logits, expected["draft_logits"][row][:drafts], **CLOSE)


def test_auto_drafts_with_the_module_that_a_checkpoint_brings(tmp_path):
    model, _ = golden("qwen3_5")
    assert drafter("qwen3_5").name == "mtp" and load_drafter("auto", model).name == "mtp"
    bare = shutil.copytree(GOLDEN / "qwen3_5", tmp_path / "bare")
    tensors = load_file(bare / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if not k.startswith("mtp.")}, bare / "model.safetensors")
    model = jaxspec.load_model(str(bare), progress=False)
    assert load_drafter("auto", model).name == "ngram"
    with pytest.raises(ConfigError, match=r"brings no MTP module.*--draft ngram"):
        load_drafter("mtp", model)


def test_a_module_that_lacks_a_tensor_is_refused_by_its_name(tmp_path):
    folder = shutil.copytree(GOLDEN / "qwen3_5", tmp_path / "lacking")
    rewrite(folder, drop=["mtp.fc.weight"])
    model = jaxspec.load_model(str(folder), progress=False)
    with pytest.raises(CheckpointError, match=r"1 missing.*\n.*missing mtp\.fc\.weight \[32, 64\]"):
        load_drafter("auto", model)


@pytest.mark.parametrize("modules,auto", [(0, "ngram"), (1, "mtp"), (2, "mtp")])
def test_without_weights_the_config_says_what_to_draft_with(tmp_path, modules, auto):
    """It may be any file."""
    config = tmp_path / "sizes.json"
    config.write_text(json.dumps(tiny_config("qwen3_5", mtp_num_hidden_layers=modules)))
    model = jaxspec.load_model(str(config), load_format="dummy")
    options = EngineConfig(draft="auto", load_format="dummy")
    assert load_drafter("auto", model, options).name == auto
    drafter = load_drafter("mtp", model, options).drafter
    assert (drafter.num_draft_tokens, drafter.reach) == (3, max(modules, 1))


def test_modules_behind_the_last_layer_have_norms_of_their_own():
    config = golden("glm4_moe")[0].config
    found = load_file(GOLDEN / "glm4_moe" / "model.safetensors")
    names = {mtp_name(name, config.num_layers) for name in found} - {None}
    second = {mtp_name(name.replace("layers.3.", "layers.4."), config.num_layers) for name in found} - {None}
    modules = mtp.Modules.among(names | second)
    assert modules == mtp.Modules(2, separate=True)
    declared = jax.tree.leaves(mtp.parameters(mtp.module_config(config), modules), is_leaf=is_param)
    wanted = {name for param in declared for name in param.sources}
    assert {"mtp.fc.weight", "mtp.layers.1.fc.weight", "mtp.layers.1.self_attn.q_proj.weight"} < wanted
    assert wanted == names | second
