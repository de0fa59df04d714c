"""How a model is divided among devices: the decisions and the cuts, with numpy alone; then programs, in a process of
its own with virtual devices (`tests/support/several_devices.py` and what is quantised, beside it)."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from openai import APIConnectionError, OpenAI

from jaxspec.checkpoint import in_format
from jaxspec.checkpoint import params as loading
from jaxspec.config.options import ConfigError
from jaxspec.decoder.forward import head_logits
from jaxspec.drafters import dflash_checkpoint, mtp
from jaxspec.models.description import Mamba2
from jaxspec.models.families import MODELS, nemotron_h
from jaxspec.models.local import local
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import Fp8, Param, Weight, by_inputs, by_outputs, is_param, linear
from jaxspec.parallel import sharding
from jaxspec.parallel.sharding import BY_REQUEST, EVERYWHERE
from tests.server.live import wait_for
from tests.support.tiny import BYTE_VOCAB, GEMMA4_ALL, tiny_checkpoint, tiny_config

ROOT = Path(__file__).resolve().parents[2]
APART = ("", "_parts", "_quantised", "_deterministic", "_pictures", "_by_request")
APART = tuple(f"tests/support/several_devices{name}.py" for name in APART)
PARTS = "family", "drafter", "trees", "mtp", "rounds", "quantised", "deterministic", "pictures"  # in names
EIGHT = dict(num_attention_heads=8, intermediate_size=64, moe_intermediate_size=32, shared_expert_intermediate_size=16)
EIGHT |= dict(linear_num_key_heads=8, linear_num_value_heads=16, attention_bias=True, mlp_bias=True)
UNBIASED = {
    "mimo_v2_flash",
    "mistral4",
    "mixtral",
    "hy_v3",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_k2",
    "kimi_linear",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen4_exp",
}
# What is whole on each device, and what one device adds to a sum. All else is divided.
WHOLE = {
    *("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm", "q_norm", "k_norm", "read_norm", "norm"),
    *("latents", "query_norm", "latent_norm"),
    *("router", "router_bias", "router_correction", "shared_gate", "fc", "embed_norm", "hidden_norm"),
    *("fc_embedding", "fc_hidden"),
    *("latent_in", "latent_out", "layer_scale"),
    *("router_norm", "expert_scale", "mlp_own_norm", "experts_norm", "experts_own_norm"),
    *("attn_gates_in", "attn_gates_out", "attn_inject", "mlp_gates_in", "mlp_gates_out", "mlp_inject"),
    *("gates_in", "gates_out", "index", "index_q_norm", "index_k_norm", "ngram_key", "ngram_value", "ngram_conv"),
    *("ngram_key_norm", "ngram_query_norm", "ngram_conv_norm"),
    *("input_gate", "input_out", "input_norm", "layer_projection", "layer_projection_norm"),
}
ONCE = {"out_bias", "down_bias", "experts_down_bias"}


def config(family: str, **sizes) -> ModelConfig:
    more = EIGHT | (dict.fromkeys(("attention_bias", "mlp_bias"), False) if family in UNBIASED else {}) | sizes
    if family == "nemotron_h":
        more |= {"mlp_bias": False, "use_bias": True, "moe_shared_expert_intermediate_size": 32}
    return ModelConfig.from_hf(tiny_config(family, 67, **more))


def declared(family: str, **sizes):
    """By name, what a family declares, its MTP module's and a DFlash drafter's beside it."""
    model = config(family, **sizes)
    trees = [MODELS[family].tensors(model.decoder)]
    hybrid = model.recurrent and family not in ("granitemoehybrid", "kimi_linear")
    if hybrid or hasattr(MODELS[family], "mtp_tensors"):
        trees.append(mtp.parameters(mtp.module_config(model)))
    if family == "gemma4":
        trees.append(
            MODELS[family].tensors(config(family, **GEMMA4_ALL, vocab_size_per_layer_input=67, **sizes).decoder)
        )
    if family == "qwen3":
        trees.append(dflash_checkpoint.parameters(model, 2, 33, ("embed_tokens.weight",)))
    for tree in trees:
        for path, param in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_param):
            yield next(key.key for key in reversed(path) if hasattr(key, "key")), param


@pytest.mark.parametrize("family", sorted(MODELS))
def test_somebody_has_decided_how_each_parameter_is_divided(family):
    """A parameter of a new name fails here until its declaration says `split`, and these tables if it isn't divided."""
    for name, param in declared(family):
        assert param.split is not None, f"{family}: {name} has no split: how is it divided among devices?"
        by_head = name in ("q_norm", "k_norm") and family in (
            "minimax_m2",
            "olmo2",
            "olmo3",
            "olmoe",
        )  # of all heads together
        by_head |= name == "latents" and family in ("deepseek_v2", "kimi_linear")  # whose queries have no latent
        by_head |= name == "read_norm" and family in ("granitemoehybrid", "nemotron_h")  # by group of heads
        expected = None if by_head else "whole" if name in WHOLE else "once" if name in ONCE else None
        assert param.split.along == expected or (expected is None and param.split.parts), (family, name)


@pytest.mark.parametrize("family", sorted(set(MODELS) - {"granitemoehybrid"}))  # whose B and C are repeated
@pytest.mark.parametrize("size", [2, 4, 8])
def test_devices_have_every_number_once(family, size):
    """But for KV heads and latents, which are repeated where there are fewer than devices, and for padding, which is
    0."""
    kv_heads = {"num_key_value_heads": 8, "num_global_key_value_heads": 8, "swa_num_key_value_heads": 8}
    for name, param in declared(family, **kv_heads):
        one, rng = sharding.local_param(param, size), np.random.default_rng(0)
        for i, (shape, own) in enumerate(zip(param.stored().values(), one.stored().values(), strict=True)):
            tensor = rng.standard_normal(shape)
            parts = [sharding.cut(param, i, tensor, rank, size) for rank in range(size)]
            assert all(part.shape == own for part in parts), (name, own)
            narrow = name in ("latents", "gates") and param.split.parts
            if param.split.along == "whole" or (narrow and narrow[i] == ((1, shape[0]),)):
                assert all((part == tensor).all() for part in parts), name
            elif param.split.along == "once":
                np.testing.assert_array_equal(sum(parts), tensor)
            else:
                numbers = np.sort(np.concatenate([part.ravel() for part in parts]))
                padding = np.zeros(numbers.size - tensor.size)
                assert padding.size == 0 or param.split.padded, name
                np.testing.assert_array_equal(numbers, np.sort(np.concatenate([tensor.ravel(), padding])))


def test_parts_of_a_tensor_are_cut_one_by_one():
    """Queries, keys and values of a convolution are one tensor; half of it would be queries and some keys."""
    param = linear(3, {"qkv": 10}, split=by_outputs(((2, 2), (2, 1), (4, 1))))
    tensor = np.arange(30).reshape(10, 3)
    rows = [sharding.cut(param, 0, tensor, rank, 2)[:, 0] // 3 for rank in range(2)]
    assert [list(each) for each in rows] == [[0, 1, 4, 6, 7], [2, 3, 5, 8, 9]]


def test_narrow_projections_have_columns_of_zeros():
    """One device's is as wide as the checkpoint's."""
    param = linear(1, {"b": 4, "a": 4}, split=by_outputs(((4, 1),), ((4, 1),)), least=6)
    sources = [np.arange(1, 5)[:, None], np.arange(5, 9)[:, None]]
    own = [sharding.cut(param, i, source, 1, 2) for i, source in enumerate(sources)]
    made = loading._placed(sharding.local_param(param, 2, 1), own, {}, "float32")
    assert made.values.tolist() == [[3, 4, 7, 8, 0, 0]]
    assert loading._placed(param, sources, {}, "float32").values.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]


def test_heads_are_repeated_on_neighbours_where_devices_are_more():
    param = linear(1, {"k": 4}, split=by_outputs(((2, 2),)))
    tensor = np.arange(4)[:, None]
    rows = [sharding.cut(param, 0, tensor, rank, 8)[:, 0].tolist() for rank in range(8)]
    assert rows == [[0, 1]] * 4 + [[2, 3]] * 4


def test_heads_of_states_have_their_groups_b_and_c():
    """Four devices and two groups: z and x of four heads each, B and C of the first group on the first two, then dt."""
    m = Mamba2(heads=4, width=2, groups=2, state=3, taps=4)
    param = nemotron_h.mamba2_tensors(m, 1, "")["in"]
    z, x, b, c, dt = np.split(np.arange(m.inner + m.channels + m.heads), np.cumsum([8, 8, 6, 6]))
    for rank in range(4):
        rows = sharding.cut(param, 0, np.arange(32)[:, None], rank, 4)[:, 0]
        heads, group = slice(2 * rank, 2 * rank + 2), slice(3 * (rank // 2), 3 * (rank // 2) + 3)
        assert rows.tolist() == [*z[heads], *x[heads], *b[group], *c[group], dt[rank]]


def test_states_in_fp8_on_load_are_divided():
    """In blocks dt couldn't be, of which a device has a column for each of its heads."""
    decoder = config("nemotron_h", hidden_size=128, mamba_head_dim=128).decoder
    states = in_format(MODELS["nemotron_h"].tensors(decoder)["layers"][0], None, "fp8", "auto", True)
    assert (states["in"].format, states["out"].format) == (Fp8(None, True), Fp8(128, True))
    for size in (2, 4, 8):
        sharding.check_params(states, size)


def test_a_vocabulary_is_padded_with_zeros():
    param = Param((5, 2), ("embed",), linear(1, {"x": 2}).layout, split=by_inputs(5, padded=True))
    tensor = np.arange(1, 11).reshape(5, 2)
    parts = [sharding.cut(param, 0, tensor, rank, 4) for rank in range(4)]
    np.testing.assert_array_equal(np.concatenate(parts), np.pad(tensor, ((0, 3), (0, 0))))


def test_arguments_without_elements_are_made_on_each_device():
    """XLA's partitioner for GPUs crashes on them: no drafts (`--draft none`) are such arguments."""
    mesh = AbstractMesh((2,), (sharding.AXIS,))
    run = lambda x, tokens: (x + tokens.sum(), tokens, jnp.zeros(len(tokens)))  # noqa: E731
    program = sharding.spread(run, mesh, (EVERYWHERE, BY_REQUEST), (EVERYWHERE, *[BY_REQUEST] * 2))
    traced = jax.make_jaxpr(program)(jnp.arange(3), jnp.zeros((8, 0), jnp.int32))
    (eqn,) = [eqn for eqn in traced.eqns if eqn.primitive.name == "shard_map"]
    assert [x.aval.shape for x in eqn.invars] == [(3,)]
    assert [x.aval.shape for x in eqn.outvars] == [(3,), (8, 0), (8,)]


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_multiplies_no_row_alone(tied):
    """Alone it would be multiplied by a float32 copy of the head, three times its bytes."""
    own, mesh = (1024, 8) if tied else (8, 1024), AbstractMesh((2,), (sharding.AXIS,))
    name, weight = ("embed", jnp.ones) if tied else ("head", lambda *of: Weight(jnp.ones(*of)))
    program = lambda hidden: head_logits({name: weight(own, jnp.bfloat16)}, hidden)  # noqa: E731
    run = sharding.spread(program, mesh, (EVERYWHERE,), EVERYWHERE)
    hidden = jax.ShapeDtypeStruct((1, 1, 8), jnp.bfloat16)
    assert jax.eval_shape(run, hidden).shape == (1, 1, 1024)
    assert "1,2,1024] = dot_general" in str(jax.make_jaxpr(run)(hidden))


def test_what_nobody_decided_about_is_refused():
    with pytest.raises(ConfigError, match=r"how to divide x\.weight isn't decided; --tp-size 1"):
        sharding.check_params([linear(4, {"x.weight": 8})], 2)


def test_a_drafters_tensor_that_cannot_be_divided_is_named():
    param = linear(4, {"mlp.gate.weight": 2048}, split=by_outputs(((2048, 1),)))
    with pytest.raises(ConfigError, match=r"--tp-size 3: mlp\.gate\.weight has 2048 x 1 outputs, and 3 devices can't"):
        sharding.check_params([param], 3)


@pytest.mark.parametrize("family,sizes,size,words", [
    ("llama", {}, 16, "8 query heads can't be divided among 16 devices; 1, 2, 4, 8 are possible"),
    ("llama", {"num_key_value_heads": 4, "num_attention_heads": 12}, 6, "4 KV heads"),
    ("llama", {"intermediate_size": 60}, 8, "60 columns of an MLP"),
    ("qwen3_moe", {"moe_intermediate_size": 12}, 8, "12 columns of an expert"),
    ("qwen3_next", {"linear_num_key_heads": 2}, 4, "2 key heads of linear attention"),
    ("qwen3_next", {"shared_expert_intermediate_size": 12}, 8, "12 columns of the shared expert"),
])  # fmt: skip
def test_sizes_that_cannot_be_divided_are_named(family, sizes, size, words):
    with pytest.raises(ConfigError, match=re.escape(f"--tp-size {size}: {words}")):
        local(config(family, **sizes).decoder, size)


def run_apart(*options: str) -> None:
    """The files of `APART` over eight virtual devices."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    # Threads for all devices of two programs: a device that waits for the others in a sum holds one.
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PJRT_NPROC": "16"}
    command = [sys.executable, "-m", "pytest", *APART, "-p", "no:cacheprovider", "-x", *options]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_several_devices_say_what_one_does():
    run_apart()


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("which", [*PARTS, f"not ({' or '.join(PARTS)})"])
def test_several_devices_in_every_combination(which):
    run_apart("-m", "exhaustive", "-k", which)


@pytest.mark.exhaustive
def test_a_server_on_four_devices_answers_a_chat():
    folder = tiny_checkpoint("llama", BYTE_VOCAB, 2, tokenizer=True, num_attention_heads=8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    flags = ["--tp-size", "4", "--draft", "ngram", "--port", str(port), "--few-programs", "--skip-warmup"]
    server = subprocess.Popen([sys.executable, "-m", "server", str(folder), *flags], cwd=ROOT, env=env)
    try:
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
        wait_for(lambda: _up(client), 120)
        ask = functools.partial(client.chat.completions.create, model=str(folder), max_tokens=12, seed=1)
        hello = [{"role": "user", "content": "hello"}]
        said = ask(messages=hello, temperature=0.7).choices[0].message.content
        streamed = ask(messages=hello, temperature=0.7, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == said
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
        assert json.loads(ask(messages=hello, response_format=schema).choices[0].message.content) in ("yes", "no")
    finally:
        server.terminate()
        assert server.wait(30) == 0


def _up(client: OpenAI) -> bool:
    try:
        return bool(client.models.list().data)
    except APIConnectionError:
        return False
