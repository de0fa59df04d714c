"""Qwen3.8-Flash-Next: hashes of n-grams, which blocks are selected, tables in FP8, and what is refused.

Its goldens are among test_hybrid_models.py's, its texts with drafts and prefixes among test_families.py's.
"""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import LLM, CheckpointError, ConfigError
from jaxspec.decoder.streams.ngrams import hashes, shifted
from jaxspec.models.description import IndexedAttention
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import Fp8
from jaxspec.pallas.attention.indexed_attention import selected
from tests.support.tiny import tiny_checkpoint

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "hybrid" / "qwen4_exp"
FLASH_NEXT = {
    "model_type": "qwen4_exp",
    "vocab_size": 248320,
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 262144,
    "ple_layer_ids": [2],
    "split_ngram_parts": 128,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
    "eos_token_id": 248046,
}


def test_the_published_sizes():
    """36 linear layers, 12 with an indexer, 51 thousand million numbers of n-grams ahead of the second layer."""
    decoder = ModelConfig.from_hf({"model_type": "qwen4_exp", "text_config": FLASH_NEXT}).decoder
    kinds = [type(layer.mixing) for layer in decoder.layers]
    assert kinds.count(IndexedAttention) == 12 and kinds[3] is IndexedAttention
    assert [i for i, layer in enumerate(decoder.layers) if layer.ngrams] == [1]
    ngrams, mixture = decoder.ngrams, decoder.mixture
    assert (len(ngrams.sizes), ngrams.width, ngrams.reach, ngrams.rows * 160 // 10**9) == (16, 160, 9, 51)
    assert (mixture.experts, mixture.per_token, decoder.streams.count, decoder.streams.rank) == (512, 10, 4, 320)
    assert {layer.mixing.gate for layer in decoder.layers if hasattr(layer.mixing, "gate")} == {"sigmoid"}


@pytest.mark.parametrize("change,words", [
    (dict(output_gate_type="relu"), "output_gate_type 'relu'.*sigmoid"),
    (dict(hc_count=1), "hc_count must be at least 2"),
    (dict(indexer_kv_heads=2), "indexer_kv_heads must be 1"),
    (dict(indexer_budget=None), "indexer_budget"),
    (dict(indexer_budget=2047), r"indexer_budget \(2047\) must be a multiple"),
    (dict(indexer_head_dim=32), "64 columns rotate, and indexer_head_dim is 32"),
    (dict(ple_layer_ids=[4]), "ple_layer_ids must name layers of linear attention"),
    (dict(ple_layer_ids=[0]), "ple_layer_ids must name layers of linear attention"),
    (dict(ple_embed_dim=100), r"ple_embed_dim \(100\) must be a multiple of 16"),
    (dict(ngram_size=1), "ngram_size must be at least 2"),
    (dict(split_ngram_parts=1000), "split_ngram_parts 1000 is not supported"),
    (dict(eos_token_id=None), "n-grams .* end at eos_token_id"),
    (dict(seed="x"), "seed must be an integer"),
    (dict(layer_types=["sliding_attention"] * 48), "sliding"),
    (dict(mtp={"rope_theta": 1e4}), "rope_theta 10000.0 of the MTP module is not supported; supported: 10000000"),
    (dict(mtp={"mtp_use_hidden_state_from_layer": 3}), "from_layer 3 of the MTP module is not supported; leave it out"),
    (dict(mtp_use_dedicated_embeddings=True), "mtp_use_dedicated_embeddings True of the MTP module"),
])  # fmt: skip
def test_what_a_config_may_not_say(change, words):
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_hf({**FLASH_NEXT, **change})


def test_hashes_are_those_of_64_bit_integers():
    """Hash by the published table, before and behind an end, and before a text."""
    ngrams = ModelConfig.from_hf(FLASH_NEXT).decoder.ngrams
    text = [*np.random.default_rng(0).integers(0, 248320, 40).tolist(), ngrams.end, 7, 248319, 0, 5]
    got = np.asarray(hashes(ngrams, shifted(ngrams, jnp.array([[-1, -1]]), jnp.array([text]))))[0]
    for i, row in enumerate(got):
        gram, ended = [text[i]], False
        for back in (1, 2):
            ended |= i < back or text[i - back] == ngrams.end
            gram.append(ngrams.end if ended else text[i - back])
        products = [token * by for token, by in zip(gram, ngrams.multipliers, strict=True)]
        mixed = [products[0] ^ products[1], products[0] ^ products[1] ^ products[2]]
        assert row.tolist() == [mixed[n // 8] % size for n, size in enumerate(ngrams.sizes)]


def test_a_row_selects_the_same_blocks_whatever_is_beside_it():
    """Whole blocks up to its own, of equals the first, and what is behind the last one."""
    rng = np.random.default_rng(0)
    queries, keys = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 24, 2, 8), (1, 6, 8)))
    positions = jnp.arange(24)[None]
    at, seen = selected(queries, keys, positions, 4, 3)
    for row in range(24):
        alone = selected(queries[:, row : row + 1], keys, positions[:, row : row + 1], 4, 3)
        assert np.array_equal(alone[0][0, 0], at[0, row]) and np.array_equal(alone[1][0, 0], seen[0, row])
        whole = (row + 1) // 4
        scores = np.maximum(np.einsum("nw,sw->sn", queries[0, row], keys[0]), 0).sum(1)[:whole]
        best = np.sort(np.argsort(-scores, kind="stable")[:3])
        expected = [4 * block + i for block in best for i in range(4)] + [*range(4 * whole, row + 1)]
        assert np.asarray(at[0, row])[np.asarray(seen[0, row])].tolist() == expected


@pytest.mark.exhaustive  # scales of tensors are read in test_quantisation.py
def test_a_table_in_fp8_has_one_scale(tmp_path):
    """Name it as transformers does, behind the table's parts; rows are scaled as they are looked up."""
    tensors = load_file(GOLDEN / "model.safetensors")
    table = [name for name in tensors if ".ngram_embedding." in name]
    scale, small = np.float32(0.0625), dict(tensors)
    for name in table:
        rounded = (np.asarray(tensors[name], np.float32) / scale).astype(ml_dtypes.float8_e4m3fn)
        small[name], tensors[name] = rounded, (rounded.astype(np.float32) * scale).astype(ml_dtypes.bfloat16)
    small[table[0].rpartition("shard_")[0] + "weight_scale"] = np.array([scale])
    config = json.loads((GOLDEN / "config.json").read_text())
    logits = []
    for name, held, more in (
        ("whole", tensors, {}),
        ("small", small, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}),
    ):
        (tmp_path / name).mkdir()
        save_file(held, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(config | more))
        model = jaxspec.load_model(str(tmp_path / name), dtype="float32", progress=False)
        logits.append(jaxspec.logits(model, np.arange(2, 22)[None]))
    assert model.params["layers"][1]["ngram_table"].format == Fp8(None)
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes"])
def test_hashes_that_are_not_the_configs_are_refused(tmp_path, name):
    folder = shutil.copytree(GOLDEN, tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    (found,) = (each for each in tensors if each.endswith(name))
    tensors[found][-1] += 2
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} is .*; by the config it is"):
        jaxspec.load_model(str(folder), progress=False)


@pytest.mark.parametrize("draft,options,words", [
    ("mtp", {}, "brings no MTP module.*Qwen3.8-Flash-Next.*Use --draft ngram"),
    ("ngram", {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype float8_e4m3fn: .* rounded ones would select other blocks"),
    ("ngram", {"deterministic": True}, "deterministic"),
])  # fmt: skip
def test_what_is_refused_by_name(draft, options, words):
    with pytest.raises((ConfigError, NotImplementedError), match=words):
        LLM(str(tiny_checkpoint("qwen4_exp")), draft, skip_warmup=True, **options)
