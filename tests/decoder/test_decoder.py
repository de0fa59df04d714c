"""Which path runs a decoder: each refuses what it doesn't implement, by construction, and says why."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from jaxspec.decoder import forward as paths
from jaxspec.decoder.deterministic import DETERMINISTIC
from jaxspec.decoder.few_rows import FEW_ROWS
from jaxspec.decoder.forward import PATHS, choose, describe, path_table
from jaxspec.decoder.fused_norms import FUSED_NORMS
from jaxspec.decoder.mixings.attention import HEADS_WRITTEN
from jaxspec.decoder.path import NO_HOPPER, Call
from jaxspec.decoder.plain import PLAIN
from jaxspec.decoder.streams import STREAMS
from jaxspec.decoder.weight_stream import WEIGHT_STREAM
from jaxspec.models.description import (
    Absent,
    Attention,
    ClampedSwiglu,
    Decoder,
    DeltaRule,
    IndexedAttention,
    KimiDelta,
    LatentAttention,
    Layer,
    LayerInputs,
    Mamba2,
    Mixture,
    Mlp,
    NGrams,
    Norm,
    SigmoidScores,
    Streams,
    beyond,
)
from jaxspec.models.families import MODELS
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.positions import Chunks, ScaleByPosition
from jaxspec.models.rope_scaling import LinearScaling, NoRotation, Proportional, Rope, RopeScaling, Yarn
from jaxspec.models.weights import Format, Fp8, Int4, Mxfp4, Nvfp4, is_param
from tests.support.tiny import tiny_config

NORM = Norm(1e-6)
SCALING = RopeScaling(8.0, 1.0, 4.0, 8192)
PLAINEST = {
    Norm: NORM,
    Chunks: Chunks(64),
    ScaleByPosition: ScaleByPosition(0.1, 64),
    RopeScaling: SCALING,
    LinearScaling: LinearScaling(4.0),
    NoRotation: NoRotation(),
    Proportional: Proportional(16),
    Yarn: Yarn(4.0, 4096, 1.1),
    Rope: Rope(1e4),
    Attention: Attention(8, 4, 128, Rope(1e4)),
    LatentAttention: LatentAttention(8, 512, 128, 128, Rope(1e4, columns=64), 0.07, NORM, 1536),
    IndexedAttention: IndexedAttention(8, 4, 128, Rope(1e4), index_heads=4, index_width=64, budget=64, ratio=4),
    DeltaRule: DeltaRule(2, 4, 128, 128, 4),
    KimiDelta: KimiDelta(8, 128, 4),
    Mamba2: Mamba2(8, 64, 2, 128, 4),
    Absent: Absent(),
    Mlp: Mlp(1024),
    Mixture: Mixture(8, 2, 128),
    ClampedSwiglu: ClampedSwiglu(1.702, 7.0),
    SigmoidScores: SigmoidScores(),
    Fp8: Fp8(128),
    Mxfp4: Mxfp4(),
    Int4: Int4(128),
    Nvfp4: Nvfp4(),
    LayerInputs: LayerInputs(8, 512),
    NGrams: NGrams((11, 13), (3, 5), 24, 2, 8, 3, 1, 1024),
    Streams: Streams(2, 8),
    Layer: Layer(Attention(8, 4, 128, Rope(1e4)), Mlp(1024), NORM),
    Decoder: Decoder(512, 512, (Layer(Attention(8, 4, 128, Rope(1e4)), Mlp(1024), NORM),), NORM),
}
EVERY, FEW, FUSED, STREAM, FP8, HEADS = ["plain", "few_rows", "fused_norms", "weight_stream", "fp8_rows", "heads"]
FP8S, TILES, POST = "fp8_stream", "fp8_tiles", "post_norms"
ALL = {EVERY, FEW, FUSED, POST, STREAM, FP8, TILES, FP8S, HEADS}
STREAMED = "streams"  # computes what the plain path does, but for what layers do with one stream
NOT_STREAMED = {"parallel", "post_norm", "residual_scale", "input_width", "output_scaled", "layer_inputs"}
INDEXED = {"heads", "kv_heads", "head_dim", "rope", "qk_norm", "gated", "index_heads", "index_width", "budget", "ratio"}
FORMATS = Fp8, Mxfp4, Int4, Nvfp4
TABLES = {
    name: path.implements | {each: each.implements[path.name] for each in FORMATS if path.name in each.implements}
    for name, path in (*((path.name, path) for path in PATHS), ("streams", STREAMS))
} | {HEADS: HEADS_WRITTEN}

# Of each field, another value than the plainest decoder's, and who computes that. Whoever adds a field decides here.
FIELDS = {
    Norm: {"eps": (1e-5, ALL), "centred": (True, {EVERY, FUSED, POST, FP8, TILES}), "mean": (True, {EVERY})},
    RopeScaling: {
        "factor": (2.0, ALL),
        "low_freq_factor": (2.0, ALL),
        "high_freq_factor": (3.0, ALL),
        "original_max_position": (4096, ALL),
    },
    Rope: {
        "theta": (1e6, ALL),
        "scaling": (SCALING, ALL),
        "columns": (32, {EVERY, FEW, FUSED, POST, STREAM, FP8, TILES, FP8S}),
        "interleaved": (True, {EVERY, FUSED, POST}),
        "sections": ((24, 20, 20), ALL),  # positions on three axes turn by them, those of one axis as ever
    },
    Attention: {
        "heads": (16, ALL),
        "kv_heads": (8, ALL),
        "head_dim": (64, ALL),
        "rope": (Rope(1e6), ALL),
        "qk_norm": (NORM, ALL),
        "qk_norm_all": (True, {EVERY, FUSED, POST, FP8, TILES}),
        "qk_norm_rotated": (True, {EVERY, POST}),
        "qk_norm_unit": (True, {EVERY}),
        "gated": (True, {EVERY, FUSED, FP8, TILES}),
        "bias": (True, {EVERY, FEW, POST, STREAM, FP8S, HEADS}),
        "out_bias": (True, {EVERY, FEW, POST, HEADS}),
        "window": (128, ALL),
        "scale": (0.1, {EVERY, FUSED, POST, STREAM, FP8, TILES, FP8S}),
        "sinks": (True, {EVERY, FEW, POST, HEADS}),
        "v_norm": (NORM, {EVERY, POST}),
        "k_is_v": (True, {EVERY, POST}),
        "shared": (True, {EVERY, POST}),
        "value_dim": (64, {EVERY}),
        "value_scale": (0.7, {EVERY}),
        "pool": (1, {EVERY}),
        "position_scale": (ScaleByPosition(0.1, 64), {EVERY}),
        "score_cap": (50.0, {EVERY}),
    },
    LatentAttention: {
        "heads": (16, {EVERY, FUSED}),
        "latent": (256, {EVERY, FUSED}),
        "key_dim": (64, {EVERY, FUSED}),
        "value_dim": (64, {EVERY, FUSED}),
        "rope": (Rope(1e6, columns=32), {EVERY, FUSED}),
        "scale": (0.1, {EVERY, FUSED}),
        "norm": (Norm(1e-5), {EVERY, FUSED}),
        "query_latent": (None, {EVERY, FUSED}),
        "by_request": (2, {EVERY}),
        "position_scale": (ScaleByPosition(0.1, 64), {EVERY, FUSED}),
    },
    Chunks: {"size": (128, {EVERY})},
    ScaleByPosition: {
        "beta": (0.2, {EVERY, FUSED}),
        "period": (128, {EVERY, FUSED}),
        "offset": (1, {EVERY, FUSED}),
    },
    LinearScaling: {"factor": (2.0, ALL)},
    NoRotation: {},
    Proportional: {"pairs": (8, ALL), "factor": (2.0, ALL)},
    Yarn: {
        "factor": (2.0, ALL),
        "original_max_position": (8192, ALL),
        "attention_factor": (1.2, ALL),
        "beta_fast": (16.0, ALL),
        "beta_slow": (2.0, ALL),
        "truncate": (False, ALL),
    },
    DeltaRule: {
        "key_heads": (4, {EVERY, FUSED, FP8, TILES}),
        "value_heads": (8, {EVERY, FUSED, FP8, TILES}),
        "key_dim": (64, {EVERY, FUSED, FP8, TILES}),
        "value_dim": (64, {EVERY, FUSED, FP8, TILES}),
        "taps": (3, {EVERY, FUSED, FP8, TILES}),
        "gate": ("sigmoid", {EVERY}),
    },
    NGrams: {
        "sizes": ((5, 7), {STREAMED}),
        "multipliers": ((7, 9), {STREAMED}),
        "rows": (32, {STREAMED}),
        "parts": (4, {STREAMED}),
        "width": (4, {STREAMED}),
        "taps": (2, {STREAMED}),
        "end": (2, {STREAMED}),
        "channels": (512, {STREAMED}),
        "number": (1, {STREAMED}),
    },
    Streams: {"count": (4, {STREAMED}), "rank": (4, {STREAMED})},
    KimiDelta: {"heads": (4, {EVERY, FUSED}), "width": (64, {EVERY, FUSED}), "taps": (3, {EVERY, FUSED})},
    Mamba2: {
        "heads": (4, {EVERY, FUSED}),
        "width": (32, {EVERY, FUSED}),
        "groups": (4, {EVERY, FUSED}),
        "state": (64, {EVERY, FUSED}),
        "taps": (3, {EVERY, FUSED}),
        "conv_bias": (False, {EVERY, FUSED}),
        "bias": (True, {EVERY}),
        "least_step": (0.1, {EVERY, FUSED}),
        "most_step": (1.0, {EVERY, FUSED}),
        "group_devices": (2, {EVERY, FUSED}),
    },
    Absent: {},
    Mlp: {
        "width": (2048, {EVERY, FEW, FUSED, POST, STREAM, FP8, TILES, FP8S}),
        "bias": (True, {EVERY, FUSED}),
        "activation": ("gelu_tanh", {EVERY, FUSED, POST}),
        "gated": (False, {EVERY, FUSED}),
    },
    Fp8: {
        "block": (None, {EVERY, FEW, FUSED, POST, FP8, TILES, FP8S}),
        "activations": (True, {EVERY, FEW, FUSED, POST, TILES}),
    },
    Mxfp4: {},
    Int4: {
        "group": (None, {EVERY, FEW, FUSED, POST}),
        "zeros": (True, {EVERY, FEW, FUSED, POST}),
        "ordered": (True, {EVERY}),
    },
    Nvfp4: {},
    ClampedSwiglu: {"alpha": (1.0, {EVERY, FEW, FUSED, POST}), "limit": (3.0, {EVERY, FEW, FUSED, POST})},
    SigmoidScores: {
        "function": ("softmax", {EVERY, FEW, FUSED, FP8, TILES}),
        "groups": (2, {EVERY, FEW, FUSED, FP8, TILES}),
        "top_groups": (2, {EVERY, FEW, FUSED, FP8, TILES}),
        "scale": (2.5, {EVERY, FEW, FUSED, FP8, TILES}),
        "corrected": (False, {EVERY, FEW, FUSED, FP8, TILES}),
    },
    Mixture: {
        "experts": (16, {EVERY, FEW, FUSED, POST, FP8, TILES}),
        "per_token": (4, {EVERY, FEW, FUSED, POST, FP8, TILES}),
        "width": (256, {EVERY, FEW, FUSED, POST, FP8, TILES}),
        "renormalised": (False, {EVERY, FEW, FUSED, POST, FP8, TILES}),
        "shared": (128, {EVERY, FEW, FUSED, POST, FP8, TILES}),
        "shared_gated": (False, {EVERY, FEW, FUSED, FP8, TILES}),
        "scores": (SigmoidScores(), {EVERY, FEW, FUSED, FP8, TILES}),
        "bias": (True, {EVERY, FEW}),
        "router_bias": (True, {EVERY, FEW}),
        "activation": (ClampedSwiglu(1.702, 7.0), {EVERY, FEW, FUSED, POST}),
        "groups": (2, {EVERY}),
        "gated": (False, {EVERY, FUSED}),
        "latent": (64, {EVERY}),
        "beside": (Mlp(64), {EVERY, POST}),
        "weighs_inputs": (True, {EVERY, FEW, FUSED, POST, FP8, TILES}),
    },
    LayerInputs: {"width": (16, {EVERY, POST}), "vocab_size": (1024, {EVERY, POST}), "padding": (1, {EVERY, POST})},
    Layer: {
        "mixing": (Attention(8, 8, 128, Rope(1e4)), {EVERY, FEW, FUSED, POST, STREAM, FP8, TILES, FP8S}),
        "feed": (Mlp(512), {EVERY, FEW, FUSED, POST, STREAM, FP8, TILES, FP8S}),
        "norm": (Norm(1e-5), {EVERY, FEW, FUSED, POST, STREAM, FP8, TILES, FP8S}),
        "pre_norm": (False, {EVERY, POST}),
        "post_norm": (True, {EVERY, POST}),
        "residual_scale": (0.5, {EVERY}),
        "input_width": (8, {EVERY, POST}),
        "output_scaled": (True, {EVERY, POST}),
        "parallel": (True, {EVERY}),
        "ngrams": (NGrams((11, 13), (3, 5), 24, 2, 8, 3, 1, 1024), {STREAMED}),
    },
    Decoder: {
        "vocab_size": (1024, {EVERY, FEW, FUSED, POST, STREAM, FP8, TILES, FP8S}),
        "width": (256, {EVERY, FEW, FUSED, POST, STREAM, FP8, TILES, FP8S}),
        "layers": ((), {EVERY, FEW, FUSED, POST, STREAM, FP8, TILES, FP8S}),
        "norm": (Norm(1e-5), {EVERY, FEW, FUSED, POST, STREAM, FP8, TILES, FP8S}),
        "tied": (True, {EVERY, FEW, FUSED, POST, STREAM, FP8, TILES, FP8S}),
        "embed_scale": (8.0, {EVERY, FEW, FUSED, POST, STREAM, FP8, TILES, FP8S}),
        "logit_scale": (0.5, {EVERY, FEW, FUSED, POST, STREAM, FP8, TILES, FP8S}),
        "layer_inputs": (LayerInputs(8, 512), {EVERY, POST}),
        "logit_cap": (30.0, {EVERY, FEW, FUSED, POST, STREAM, FP8, TILES, FP8S}),
        "deterministic": (256, set()),  # a path of its own
        "reports_experts": (True, {EVERY}),
        "streams": (Streams(2, 8), {STREAMED}),
    },
}
FIELDS[IndexedAttention] = {
    name: (value, {EVERY} if name in INDEXED else set())
    for name, (value, _) in {
        **FIELDS[Attention],
        "index_heads": (2, ()),
        "index_width": (32, ()),
        "budget": (32, ()),
        "ratio": (8, ()),
    }.items()
}


def test_every_field_of_every_description_is_decided_on():
    for kind, plainest in PLAINEST.items():
        assert FIELDS[kind].keys() == {field.name for field in dataclasses.fields(plainest)}, kind
    kinds = [kind for kind in vars(paths).values() if dataclasses.is_dataclass(kind)]
    assert {kind for kind in kinds if kind.__module__.endswith("description")} <= set(FIELDS)


@pytest.mark.parametrize("kind,field", [(kind, field) for kind, fields in FIELDS.items() for field in fields])
def test_a_path_refuses_what_it_does_not_implement(kind, field):
    value, implementing = FIELDS[kind][field]
    if EVERY in implementing and field not in NOT_STREAMED and kind is not LayerInputs:
        implementing = implementing | {STREAMED}
    changed = dataclasses.replace(PLAINEST[kind], **{field: value})
    for name, table in TABLES.items():
        reason = beyond(changed, table)
        assert (reason is None) == (name in implementing), f"{name}: {reason}"
        if reason and kind in table:
            assert field in reason


def test_a_field_that_is_added_is_refused_by_all_until_they_name_it():
    @dataclasses.dataclass(frozen=True)
    class Later(Mlp):
        squared: bool = False

    for path in PATHS:
        table = {**path.implements, Later: path.implements[Mlp]}
        known, other = Later(1024), Later(1024, squared=True)
        assert beyond(known, table) is None
        assert beyond(other, table) == "Later.squared=True"
        assert beyond(other, path.implements) == "Later"


def test_a_difference_is_found_wherever_it_is():
    odd = Layer(Attention(8, 4, 128, Rope(1e4), gated=True), Mlp(1024), NORM)
    decoder = dataclasses.replace(PLAINEST[Decoder], layers=(*PLAINEST[Decoder].layers * 3, odd))
    assert beyond(decoder, FEW_ROWS.implements) == "Attention.gated=True"
    assert beyond(decoder, PLAIN.implements) is None


@dataclasses.dataclass(frozen=True)
class Later(Format):
    """A format that nobody implements yet."""


def with_format(layers, name: str, format):
    """The layers, of which the last has one weight in this format."""
    return [*layers[:-1], layers[-1] | {name: layers[-1][name].replace(format=format)}]


@pytest.mark.parametrize("family,name", [("qwen3", "down"), ("qwen3_moe", "experts_down"), ("qwen3_next", "router")])
def test_a_path_refuses_a_format_that_it_does_not_implement(family, name):
    """Whichever weight has it, before sizes are looked at; a kernel that is handed such a weight raises."""
    decoder, layers = described(family)
    call = Call(1, 1, "bfloat16", processors=132)
    for path in PATHS:
        assert "weights in" not in (path.refuses(decoder, layers, call) or "")
        if beyond(decoder, path.implements) is None:
            assert path.refuses(decoder, with_format(layers, name, Later()), call) == "weights in Later"
    with pytest.raises(NotImplementedError, match="the plain one lacks weights in Later"):
        choose(decoder, with_format(layers, name, Later()), call)
    with pytest.raises(TypeError, match=r"a weight in .*Later.* was given to a kernel that takes unquantised ones"):
        with_format(layers, name, Later())[-1][name].unquantised  # noqa: B018


def described(family: str, **overrides):
    """A decoder, and its layers' weights as shapes."""
    sizes = dict(hidden_size=2048, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    config = ModelConfig.from_hf(tiny_config(family, **sizes | overrides))
    tensors = MODELS[family].tensors(config.decoder)["layers"]
    shape = lambda param: param.made(jax.ShapeDtypeStruct(param.shape, param.dtype or "bfloat16"))  # noqa: E731
    return config.decoder, jax.tree.map(shape, tensors, is_leaf=is_param)


def test_narrow_heads_of_which_a_part_rotates_are_not_a_deterministic_rounds():
    """They are a wide round's, whatever part it is: the kernel of few rows takes a half alone."""
    decoder, layers = described("phi3", hidden_size=1024, partial_rotary_factor=0.25)
    assert decoder.attention.rope.columns == 32
    decoder = dataclasses.replace(decoder, deterministic=256)
    assert DETERMINISTIC.refuses(decoder, layers, Call(1, 1, "bfloat16", processors=132)) is None


@pytest.mark.parametrize("requests,rows,path", [
    (1, 1, FEW_ROWS), (8, 1, FEW_ROWS), (2, 4, FEW_ROWS), (9, 1, WEIGHT_STREAM), (3, 5, WEIGHT_STREAM),
    (16, 1, WEIGHT_STREAM), (32, 4, WEIGHT_STREAM), (64, 4, PLAIN), (1, 64, WEIGHT_STREAM),
])  # fmt: skip
def test_rounds_of_a_dense_model_take_the_fastest_path_that_fits(requests, rows, path):
    chosen, refused = choose(*described("qwen3"), Call(requests, rows, "bfloat16", processors=132))
    assert chosen is path
    assert list(refused) == [each.name for each in PATHS[: PATHS.index(path)]]


def test_each_faster_path_says_why_not():
    decoder, layers = described("qwen3", attention_bias=True)
    assert choose(decoder, layers, Call(8, 1, "bfloat16", processors=132))[0] is FEW_ROWS
    path, refused = choose(decoder, layers, Call(16, 1, "bfloat16", processors=132))
    assert path is PLAIN
    assert "16 rows" in refused[FEW_ROWS.name] and refused[WEIGHT_STREAM.name] == "Attention.out_bias=True"
    assert refused[FUSED_NORMS.name] == "Attention.bias=True"
    _, refused = choose(*described("qwen3"), Call(8, 1, "bfloat16", processors=0))
    assert refused[WEIGHT_STREAM.name] == NO_HOPPER
    _, refused = choose(*described("qwen3"), Call(64, 4, "bfloat16", processors=132))
    assert "256 rows" in refused[FEW_ROWS.name] and "zero-centred" in refused[FUSED_NORMS.name]
    _, refused = choose(*described("qwen3_moe"), Call(16, 1, "bfloat16", processors=132))
    assert refused[WEIGHT_STREAM.name] == "Mixture"


@pytest.mark.parametrize("experts", [32, 128])
def test_gpt_oss_takes_few_rows(experts):
    """With biases, sinks, windows, and MXFP4 experts, whose kernels are their own; of an odd width."""
    sizes = dict(num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=experts)
    decoder, layers = described("gpt_oss", hidden_size=2880, intermediate_size=2880, **sizes)
    packed = [layer | {"experts_down": layer["experts_down"].replace(format=Mxfp4())} for layer in layers]
    for rows in (1, 8):
        assert choose(decoder, packed, Call(rows, 1, "bfloat16", processors=132))[0] is FEW_ROWS
    assert choose(decoder, packed, Call(16, 1, "bfloat16", processors=132))[0] is PLAIN


def test_layers_with_ropes_of_their_own_take_few_rows():
    decoder, layers = described("qwen3")

    def refused(**changes):
        one = dataclasses.replace(decoder.layers[0], mixing=dataclasses.replace(decoder.attention, **changes))
        mixed = dataclasses.replace(decoder, layers=(*decoder.layers[1:], one))
        return choose(mixed, layers, Call(8, 1, "bfloat16", processors=132))[1].get(FEW_ROWS.name)

    assert refused(window=64) is refused(rope=Rope(100.0), window=64) is None
    assert refused(rope=Rope(1e4, columns=32)) == "32 of 128 columns rotated; supported: 64 and 128"


def test_layers_with_heads_of_their_own_share_no_kernel():
    decoder, layers = described("qwen3")
    other = dataclasses.replace(decoder.layers[0], mixing=dataclasses.replace(decoder.attention, kv_heads=4))
    mixed = dataclasses.replace(decoder, layers=(other, *decoder.layers[1:]))
    path, refused = choose(mixed, layers, Call(8, 1, "bfloat16", processors=132))
    assert path is PLAIN
    for name in (FEW_ROWS.name, WEIGHT_STREAM.name):
        assert refused[name] == "layers whose attention differs in its heads"


def test_what_no_path_implements_is_an_error():
    @dataclasses.dataclass(frozen=True)
    class Other(Mlp):
        pass

    layer = dataclasses.replace(PLAINEST[Layer], feed=Other(1024))
    decoder = dataclasses.replace(PLAINEST[Decoder], layers=(layer,))
    with pytest.raises(NotImplementedError, match="the plain one lacks Other"):
        choose(decoder, [], Call(1, 1, "bfloat16", processors=132))


def test_the_table_has_a_line_for_each_batch():
    table = path_table(*described("qwen3"), [1, 8, 64], 4, "bfloat16")
    assert [line["rows"] for line in table] == [4, 32, 256]
    assert all(line["path"] == "plain" for line in table)  # a CPU has no multiprocessors
    assert table[0]["refused"][FEW_ROWS.name] == NO_HOPPER
    assert describe(table) == "the decoder's layers in a round of 4, 32, 256 rows: plain", "nothing of Hopper"
