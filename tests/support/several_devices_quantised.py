"""Quantised models divided among virtual CPU devices: as `several_devices.py`, of weights, keys and values in FP8,
experts in MXFP4, weights of four bits, and GGUF.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from types import SimpleNamespace as Leaf

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

import jaxspec
from jaxspec.checkpoint import params
from jaxspec.checkpoint.gguf import packing
from jaxspec.checkpoint.packed import INT8
from jaxspec.config.engine_config import ON_LOAD
from jaxspec.drafters import own_weights
from jaxspec.engine import weights
from jaxspec.models.weights import WHOLE, Fp8, Int4, Layout, Nvfp4, Param, by_inputs, by_outputs, expert_stack, linear
from jaxspec.parallel import sharding
from tests.checkpoint.test_four_bits import AWQ, COMPRESSED, GPTQ, MODELOPT, NVFP4, four_bits
from tests.checkpoint.test_gguf import write_gguf
from tests.engine.test_host_cache import alone, conversations, said
from tests.support import engines, hybrids, quantised
from tests.support.hosting import host_cache
from tests.support.sample import some
from tests.support.several_devices import BATCHES, EIGHT, HYBRID, PROMPTS, VOCAB, check, engine
from tests.support.tiny import tiny_checkpoint

LOADED = dict(hidden_size=256, intermediate_size=256, head_dim=64, num_attention_heads=4, num_key_value_heads=4)
LOADED |= dict(num_hidden_layers=1)


def stored(kind, path):
    """A tiny checkpoint in this format, of which two devices have whole blocks, and options to load it with."""
    if kind == "mxfp4":
        sizes = dict(num_hidden_layers=1, num_attention_heads=8, intermediate_size=64)
        return quantised.write_mxfp4(tiny_checkpoint("gpt_oss", **sizes), path)[0], {}
    if kind in (AWQ, GPTQ, "gptq-order", COMPRESSED, INT8, NVFP4, MODELOPT):
        return four_bits(kind, path, family="llama", **LOADED)[0], {}
    source = tiny_checkpoint("llama", **LOADED)
    if kind in ("block", "channel", "tensor"):
        how = (quantised.BLOCKS, "_scale_inv") if kind == "block" else (quantised.compressed(kind), "_scale")
        return quantised.write(source, path, kind, *how)[0], {}
    if kind in ("fp8", "int4"):
        return source, {"quantization": kind}
    hf, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    write_gguf(path / "m.gguf", hf, tensors, gguf.GGMLQuantizationType[kind])
    return path / "m.gguf", {}


@pytest.mark.parametrize("kind", [
    *("block", "channel", "tensor", "fp8", "int4", "mxfp4", AWQ, GPTQ, "gptq-order", COMPRESSED, INT8, NVFP4, MODELOPT),
    *("F16", "Q8_0", "Q4_0", "Q4_1"),
])  # fmt: skip
def test_two_devices_get_the_parts_of_what_one_reads(kind, tmp_path, monkeypatch):
    """In every format that a file may have, GGUF's of four bits as they are on a GPU. Sources and scales are compared
    as they go to devices, which compiles nothing."""
    monkeypatch.setattr(packing, "kernels_here", lambda: True)
    host = lambda param, sources, scales, *_: Leaf(param=param, of=[*sources, *scales.values()])  # noqa: E731
    monkeypatch.setattr(params, "_placed", host)
    monkeypatch.setattr(params.Reserved, "moved", lambda _, made: made)
    monkeypatch.setattr(params.sharding, "joined", lambda param, made, mesh: Leaf(of=made))
    folder, options = stored(kind, tmp_path)
    read = functools.partial(jaxspec.load_model, str(folder), dtype="float32", progress=False, **options)
    leaves = (jax.tree.leaves(model.params) for model in (read(), read(tp_size=2)))
    for whole, divided in zip(*leaves, strict=True):
        if whole.param.order and whole.param.split.along == "inputs":
            continue  # two devices dequantise it
        for expected, *parts in zip(whole.of, *(rank.of for rank in divided.of), strict=True):
            cut = [i for i, (n, own) in enumerate(zip(expected.shape, parts[0].shape, strict=True)) if n != own]
            made = np.concatenate(parts, cut[0]) if cut else parts[0]
            if whole.param.stacked:  # each device has its rows of gate, then those of up
                made, expected = np.sort(made, axis=1), np.sort(expected, axis=1)
            np.testing.assert_array_equal(made, expected, whole.param.sources[0])


def weights_of_every_kind():
    """Declarations that devices divide: of heads that several share, fused, in groups, and experts stored either way.
    Two and four devices have whole blocks and groups of most."""
    heads = by_outputs(((4, 128),), ((2, 256),), ((2, 256),))
    pairs, groups = Layout((512,), grouped=(1, 1)), Layout((1024,), grouped=(128, 128))
    up = {"experts.{}.up": 512, "experts.{}.gate": 512}
    stack = functools.partial(Param, (4, 512, 256), ("s",), whole="s", transpose=True)
    return {
        "qkv": linear(256, {"q": 512, "k": 512, "v": 512}, split=heads),
        "gate_up": linear(256, {"gate": 512, "up": 512}, 32, split=by_outputs(((512, 1),), ((512, 1),))),
        "out": linear(512, {"o": 256}, split=by_inputs(4, 128)),
        "keys_values": Param((256, 1024), ("kv",), groups, transpose=True, split=by_outputs(((4, 256),))),
        "whole": linear(256, {"latents": 64}, split=WHOLE),
        "experts": expert_stack(4, 256, "e", up, by_outputs(((512, 1),), ((512, 1),))),
        "experts_in_groups": expert_stack(4, 256, "e", up, by_outputs(((512, 1),), ((512, 1),), groups=2)),
        "experts_by_inputs": expert_stack(4, 512, "d", {"experts.{}.down": 256}, by_inputs(512)),
        "pairs": stack(layout=pairs, split=by_outputs(((256, 2),))),
        "pairs_in_groups": stack(layout=pairs, split=by_outputs(((256, 2),), groups=2)),
        "stack_by_inputs": dataclasses.replace(stack(layout=Layout((256,)), split=by_inputs(512)), shape=(4, 256, 512)),
    }


KINDS = ("qkv", "gate_up", "out", "keys_values", "whole", "experts", "experts_in_groups", "experts_by_inputs", "pairs")
KINDS += ("pairs_in_groups", "stack_by_inputs")
MADE = Nvfp4(), Fp8(None), Fp8(128), Int4(None), Int4(128), Int4(32)  # of formats
OFTEN = [(Nvfp4(), name, 2, False) for name in ("qkv", "out", "experts", "pairs_in_groups")]
OFTEN += [(Fp8(None), "out", 2, True), (Int4(None), "experts_by_inputs", 2, False), (Fp8(128), "gate_up", 2, False)]


@pytest.mark.parametrize("format,name,size,made_up", some(OFTEN, MADE, KINDS, (2, 4), (False, True)))
def test_devices_quantise_their_parts_as_one_does_the_whole(format, name, size, made_up):
    """Compare numbers bit for bit, also where all inputs of an output or a whole matrix share a scale."""
    mesh, rng = sharding.mesh_of(size), np.random.default_rng(0)
    param = dataclasses.replace(weights_of_every_kind()[name], format=format)
    shapes = param.stored_values().items()
    given = {source: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for source, shape in shapes}
    make = functools.partial(params.assemble, param, given, "float32")
    make = functools.partial(params.dummy, param, "float32", 0) if made_up else make
    one, several = make(mesh=None), make(mesh=mesh)
    numbers = jax.jit(lambda param, weight: params._sources(param, weight.dequantised("float32"))[1], static_argnums=0)
    expected, (like, _) = numbers(param, one), params._sources(param, jnp.zeros(param.shape))
    for rank in range(size):
        part = jax.tree.map(lambda x, rank=rank: np.asarray(x.addressable_shards[rank].data), several)
        for i, found in enumerate(numbers(sharding.local_param(param, size, rank), part)):
            np.testing.assert_array_equal(found, sharding.cut(like, i, np.asarray(expected[i]), rank, size))


@pytest.mark.parametrize("family,to,groups", some([("llama", "nvfp4", 1)], ("llama", "qwen3_moe"), ON_LOAD, (1, 2)))
def test_an_update_is_quantised_as_on_load(family, to, groups):
    """Give values that are divided among devices already."""
    sizes = LOADED | {"moe_intermediate_size": 256}
    options = {"tp_size": 2, "ep_size": groups if family == "qwen3_moe" else 1, "progress": False}
    read = functools.partial(jaxspec.load_model, str(tiny_checkpoint(family, **sizes)), **options)
    plain, model = read(), read(quantization=to)
    found = weights._fitted(weights.declared(model), model.params, plain.params, "target")
    jax.tree.map(np.testing.assert_array_equal, found, weights._leaves(model.params))


@pytest.mark.parametrize("axis,size", some([(0, 2)], (0, 1), (2, 4)))
def test_copies_of_a_head_have_the_blocks_of_one_device(axis, size):
    """Parts of 192 tokens end within a block."""
    head = np.random.default_rng(0).standard_normal((192 * size, 160), np.float32)
    head = head.T if axis else head
    spec = PartitionSpec(*[None] * axis, sharding.AXIS)
    divided = jax.device_put(head, NamedSharding(sharding.mesh_of(size), spec))
    one, several = own_weights._fp8_copy(jnp.asarray(head), axis), own_weights._fp8_copy(divided, axis)
    np.testing.assert_array_equal(several.values, one.values)
    each = np.repeat(np.asarray(one.scales), 192 * size // len(one.scales), axis=0)
    np.testing.assert_array_equal(np.repeat(np.asarray(several.scales), 64, axis=0), each)


@pytest.mark.exhaustive
@pytest.mark.parametrize("known", [None, list(range(1, 40, 3))])
def test_drafts_by_a_copy_of_the_head_in_fp8(known, monkeypatch, tmp_path):
    """Each device's part of the head has a copy, also of a token map's; the layer is too small for blocks of 128 to be
    divided."""
    kept = own_weights.in_format
    monkeypatch.setattr(own_weights, "in_format", lambda declared, how, _, *rest: kept(declared, how, None, *rest))
    folder = hybrids.checkpoint("qwen3_5", VOCAB, 2, **EIGHT | HYBRID)
    (tmp_path / "map.json").write_text(json.dumps(known))
    some = {} if known is None else {"draft_token_map": str(tmp_path / "map.json")}
    plain, llm = engine(folder, "none", 1), engine(folder, "mtp", 2, draft_quantization="fp8", **some)
    copy = llm.engine.runner.draft.params["head"]["head_copy"]
    assert copy.values.sharding.spec == copy.scales.sharding.spec == PartitionSpec(sharding.AXIS)
    texts, expected = ([out.token_ids for out in each.generate(PROMPTS, BATCHES["greedy"])] for each in (llm, plain))
    assert texts == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 4])
def test_fp8_in_blocks_by_channel_and_by_matrix(size, tmp_path):
    """Each device has whole blocks of 128; where it can't, the tensor is named."""
    sizes = dict(head_dim=64, num_attention_heads=8, num_key_value_heads=8, intermediate_size=512)
    source = tiny_checkpoint("qwen3", VOCAB, 2, tokenizer=True, **sizes)
    for kind in ("block", "channel", "tensor"):
        config = quantised.BLOCKS if kind == "block" else quantised.compressed(kind)
        suffix = "_scale_inv" if kind == "block" else "_scale"
        folder, _ = quantised.write(source, tmp_path / kind, kind, config, suffix)
        check(folder, "ngram", size)
    check(source, "none", size, quantization="fp8")
    with pytest.raises(jaxspec.ConfigError, match=r"_proj.weight would be cut into 64 .*puts, and blocks of 128 share"):
        engine(tmp_path / "block" / "fp8", "none", 8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 4])
def test_scales_of_keys_and_values_by_head(size, tmp_path):
    """Take two KV heads, which four devices have twice."""
    source = tiny_checkpoint("qwen3", VOCAB, 2, tokenizer=True, **EIGHT)
    folder, _ = quantised.write(source, tmp_path, "channel", quantised.compressed("channel"), "_scale")
    file = folder / "model.safetensors"
    scales = {f"model.layers.0.self_attn.{x}_scale": np.array([0.003, 0.02], np.float32) for x in "kv"}
    quantised.save(quantised.read(file) | scales, file)
    several = check(folder, "ngram", size, kv_cache_dtype="fp8")
    held = np.asarray(several.engine.runner.state.cache.scales)
    assert held[0, 0].tolist() == np.repeat(scales["model.layers.0.self_attn.k_scale"], size // 2).tolist()


@pytest.mark.exhaustive
def test_fp8_experts(tmp_path):
    sizes = dict(head_dim=64, num_attention_heads=4, num_key_value_heads=4, moe_intermediate_size=256)
    source = tiny_checkpoint("qwen3_moe", VOCAB, 2, tokenizer=True, **sizes)
    folder, _ = quantised.write(source, tmp_path)
    check(folder, "ngram", 2)
    check(folder, "none", 2, groups=2)


@pytest.mark.exhaustive
def test_mxfp4_experts(tmp_path):
    """Blocks of 32 inputs share a scale."""
    source = tiny_checkpoint("gpt_oss", VOCAB, 2, tokenizer=True, num_attention_heads=8, intermediate_size=128)
    folder, _ = quantised.write_mxfp4(source, tmp_path)
    for size in (2, 4):
        check(folder, "ngram", size)
    with pytest.raises(jaxspec.ConfigError, match=r"down_proj_blocks would be cut into 16 inputs, .* --ep-size"):
        engine(folder, "none", 8)
    check(folder, "none", 8, groups=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", [AWQ, "gptq-order", MODELOPT])
def test_four_bits(layout, tmp_path):
    """Packed weights, made int4 on load, and with inputs in another order, of which those divided by them aren't."""
    sizes = dict(
        family="qwen3_moe", num_attention_heads=8, num_key_value_heads=8, head_dim=32, moe_intermediate_size=256
    )
    packed, plain = four_bits(layout, tmp_path, vocab=VOCAB, tokenizer=True, **sizes)
    check(packed, "ngram", 2)
    if layout == AWQ:
        check(plain, "ngram", 2, quantization="int4")
        check(packed, "none", 2, groups=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("pages", ["auto", "fp8"])
def test_quantised_pages_come_back_from_the_host(pages):
    """And unquantised ones, whose heads are divided as well."""
    options = engines.CROWDED | {"num_draft_tokens": 3, "tp_size": 2, "kv_cache_dtype": pages}
    llm, prompts = jaxspec.LLM(engines.checkpoint(), "ngram", **options), conversations(256)
    with host_cache(llm) as cache:
        cold = alone(llm, prompts)
        assert said(alone(llm, prompts)) == said(cold)
        assert cache.figures.loaded_blocks and not cache.figures.damaged_blocks
