"""Kernel cases at small sizes: kernel and plain jax.numpy agree, and bytes and operations are those of the case."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxspec.bench import __main__ as bench
from jaxspec.bench import cases, kernels
from jaxspec.bench.cases import attention, matmuls, mixtures
from jaxspec.models.weights import HALF
from jaxspec.pallas import hopper
from jaxspec.pallas.dense.weight_stream import STAGES
from tests.pallas.dense.test_few_rows import INTERPRET
from tests.support.kernels import lowered
from tests.support.sample import rare

LIMITS = kernels.floors.Ceilings(1e12, 1e12)


@pytest.mark.parametrize("first", [rare(True), rare(False)], ids=["the first of each group", "every case"])
def test_the_command_times_every_group(tmp_path, capsys, monkeypatch, first):
    if first:
        one_each = list({case.group: case for case in reversed(cases.make_cases(small=True))}.values())
        monkeypatch.setattr(kernels, "make_cases", lambda small: one_each[::-1])
    assert bench.main(["kernels", "--small", "--repeats", "2", "--json", str(tmp_path / "x.json")]) == 0
    document = json.loads((tmp_path / "x.json").read_text())
    assert {row["group"] for row in document["rows"]} == {case.group for case in cases.make_cases(small=True)}
    assert document["notes"] == [
        "layer matmuls and few rows' layers are left out (--small): these kernels take full sizes, on a Hopper GPU"
    ]
    for row in document["rows"]:
        assert row["ran"] == "reference" and row["error"] < 1e-5  # a CPU has no kernels
        assert row["tb_per_s"] == pytest.approx(row["bytes"] / row["us"] / 1e6)
        assert row["ratio"] == pytest.approx(row["us"] / row["floor_us"])


def test_only_and_no_plain(tmp_path, capsys):
    only = ["--only", "attention 3 x 17, 4 rows", "--no-plain"]
    bench.main(["kernels", "--small", "--repeats", "1", *only, "--json", str(tmp_path / "x.json")])
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert row["case"] == "decode attention 3 x 17, 4 rows" and "error" not in row
    with pytest.raises(SystemExit):
        bench.main(["kernels", "--small", "--only", "nonsense"])
    assert "--only nonsense: no case has this in its name; there are decode attention" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main(["kernels"])
    told = capsys.readouterr().err
    assert "on a CPU" in told and "--small" in told and told.count("\n") == 1, "one line, without the usage"


@pytest.mark.exhaustive
def test_interpreted_kernels_are_compared_on_a_cpu(tmp_path, capsys):
    only = ["--only", "attention 2 x 40, 1 row, 4 heads, FP8 KV"]
    assert bench.main(["kernels", "--interpret", *only, "--json", str(tmp_path / "x.json")]) == 0
    document = json.loads((tmp_path / "x.json").read_text())
    (row,) = document["rows"]
    assert row["ran"] != "reference" and row["error"] < 1e-5
    assert document["notes"][0] == "interpreted: errors are the kernels', times are the interpreter's"
    assert bench.kernels.portable.kernels_here() is not None, "only meanwhile"


def test_a_wrong_kernel_shows_as_an_error(monkeypatch):
    right = attention.paged_attention
    monkeypatch.setattr(
        attention,
        "paged_attention",
        lambda q, kv, layer, table, start, **how: right(q, kv, layer, table, start - 1, **how),
    )
    assert measured(cases.make_cases(small=True)[0], plain=True)["error"] > 1e-3


def measured(case, plain=False, limits=LIMITS):
    (programs,) = kernels.compiled([kernels.prepared(case, limits, plain)])
    return kernels.measure(case, programs, 1, limits, seed=0)


def test_each_layer_has_its_own_share_of_the_cache():
    case = attention.decode_attention(2, 40, 1, layers=2, dtype="float32")
    shared, cache = case.build(jax.random.key(0))
    first, second = (case.op(layer, shared, cache) for layer in (0, 1))
    assert cache.shape[0] == 2 and abs(first - second).max() > 1e-3


def test_what_the_operation_chose_is_told(monkeypatch):
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)

    def chooses(q, kv, layer, table, start, **how):
        hopper.count("some_kernel")
        return attention.reference(q, kv, layer, table, start, **how)

    monkeypatch.setattr(attention, "paged_attention", chooses)
    assert measured(cases.make_cases(small=True)[0])["ran"] == "some_kernel"


def test_a_program_calls_the_operation_on_each_layer():
    called = []

    def op(layer, shared, own):
        called.append(layer)
        return shared + own[layer]

    operands = jnp.float32(1), [jnp.float32(5), jnp.float32(6)]
    seconds, first, alone = kernels.timed(kernels.lowered(op, operands, 2).compile(), operands, 2, repeats=1)
    assert called == [0, 1] and first == 6 and seconds > 0 and alone is None


def test_a_short_program_goes_through_the_layers_until_it_is_long_enough():
    case, limits, called = cases.make_cases(small=True)[0], kernels.floors.Ceilings(1e9, 1e15), []
    floor = limits.seconds(case.size, case.flops)
    op = lambda layer, *operands: called.append(layer) or case.op(layer, *operands)  # noqa: E731
    programs = kernels.prepared(dataclasses.replace(case, op=op), limits, False, 3.1 * case.layers * floor)
    assert programs.passes == 3
    assert called == 3 * list(range(case.layers))


def test_the_profiler_counts_the_kernels_of_every_call(monkeypatch):
    def traced(work, times):
        work()
        return [{"kernel": "a", "us": 60 / times, "calls": 1.0}, {"kernel": "b", "us": 30 / times, "calls": 1.0}]

    monkeypatch.setattr(kernels.profile, "kernels", traced)
    operands = jnp.float32(1), [jnp.float32(5), jnp.float32(6)]
    program = kernels.lowered(lambda layer, shared, own: shared + own[layer], operands, 2, passes=2).compile()
    *_, alone = kernels.timed(program, operands, 4, 1, profiled=True)
    assert alone == pytest.approx(90e-6 / (4 * kernels.PROFILED))


def test_what_an_operation_changes_in_place_reaches_the_next():
    def op(layer, shared, own):
        return shared * own, own + 1

    held = jnp.float32(1)
    program = kernels.lowered(op, (jnp.float32(5), held), 2, in_place=True).compile()
    _, first, _ = kernels.timed(program, (jnp.float32(5), held), 2, repeats=3, in_place=True)
    assert first == 5 and held == 1


def test_sizes_are_those_of_the_model_they_stand_for():
    named = {case.name: case for case in cases.make_cases(small=False)}
    decode = named["decode attention 32 x 4096, 1 row"]
    assert decode.size == 2 * 32 * (4096 * 2 * 8 * 128 + 2 * 32 * 128)  # bf16: keys and values, queries and outputs
    assert decode.flops == 4 * 32 * 4096 * 32 * 128
    assert named["prompt attention 1 x 8192"].flops == pytest.approx(4 * 32 * 128 * 8192**2 / 2, rel=1e-3)
    assert named["gated delta 32 x 4 rows"].size == 2 * 32 * 32 * 128 * 128 * 4  # float32 states, read and written


def test_experts_count_the_weights_that_are_chosen():
    case = mixtures.experts_mlp("tiny", 3, 64, 32, 8, 2, layers=2, dtype="float32")
    (_, _, ids), own = case.build(jax.random.key(0))
    assert [each.shape for each in ids] == [(3, 2)] * case.layers and len(own) == case.layers == 2
    distinct = [len(set(layer.ravel().tolist())) for layer in ids]
    assert case.size == 4 * (sum(distinct) / 2 * 3 * 64 * 32 + 2 * 3 * 64)
    assert case.flops == 2 * 3 * 2 * 3 * 64 * 32
    one = mixtures.experts_mlp("tiny", 1, 64, 32, 8, 2, layers=2, dtype="float32")
    assert one.size == 4 * (2 * 3 * 64 * 32 + 2 * 64)  # a token's experts are distinct


def test_layer_matmuls(monkeypatch):
    """Stages, weights and scales reach the kernel in the order in which it takes them."""

    def stream(x, rows, weights, scales, eps):
        weights, scales = list(weights), list(scales)
        for stage in STAGES:
            if stage == "norm":
                x = x if rows is None else x + rows
                rows = matmuls.rms_norm(x, scales.pop(0), eps)
            elif stage == "gated":
                gate, up = jnp.moveaxis((rows @ weights.pop(0)).reshape(len(x), -1, 2, HALF), 2, 0)
                rows = (jax.nn.silu(gate) * up).reshape(len(x), -1)
            else:
                rows = rows @ weights.pop(0)
        return x, rows[None]

    monkeypatch.setattr(matmuls.weight_stream, "stream", stream)
    case = matmuls.layer_matmuls(8, 64, 128, 96, layers=2)
    row = measured(case, plain=True)
    assert row["error"] < 0.02  # this one rounds its last sum to bfloat16
    weights = 64 * 64 + 64 * 256 + 128 * 64 + 64 * 96
    assert row["flops"] == 2 * 8 * weights and row["bytes"] == 2 * (weights + 8 * (3 * 64 + 96))
    _, own = case.build(jax.random.key(0))
    assert len(own) == 2 and not (own[0][2][0] == own[1][2][0]).all()  # no layer finds another's weights in a cache


@pytest.mark.exhaustive  # likewise
@pytest.mark.parametrize("quantised", [False, True])
def test_layer_matmuls_call_the_kernel_as_it_is(quantised):
    """Its own signature and shapes, up to CUDA's code: only a Hopper GPU could run it."""
    case = matmuls.layer_matmuls(16, 256, 512, 384, 2, quantised)
    shared, own = jax.eval_shape(case.build, jax.random.key(0))
    assert "mosaic_gpu" in lowered(partial(case.op, 1), shared, own)


@pytest.mark.parametrize("width,normed", [rare(64, False), rare(128, True)])
def test_few_rows_layer(monkeypatch, width, normed):
    """Its plain form is what the kernels compute, interpreted, in place and layer by layer."""
    for name in ("heads", "gated", "add_product"):
        monkeypatch.setattr(matmuls.few_rows, name, partial(getattr(matmuls.few_rows, name), **INTERPRET))
    case = matmuls.few_rows_layer(8, 192, 2, 1, width, 128, normed, layers=2)
    row = measured(case, plain=True)
    assert row["error"] < 0.02 and row["ran"] == "few_rows"
    weights = 192 * 4 * width + 2 * width * 192 + 192 * 256 + 128 * 192
    assert row["flops"] == 2 * 8 * weights and row["bytes"] == 2 * (weights + 8 * (2 * 192 + 4 * width))


@pytest.mark.exhaustive  # the kernels by themselves are lowered in tests/pallas/dense
@pytest.mark.parametrize("quantised", [False, True])
def test_few_rows_layer_calls_the_kernels_as_they_are(quantised):
    case = matmuls.few_rows_layer(8, 2048, 8, 2, 128, 512, True, layers=1, quantised=quantised)
    shared, own = jax.eval_shape(case.build, jax.random.key(0))
    assert lowered(partial(case.op, 0), shared, own).count("custom_call @mosaic_gpu") == 4


@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_program_does_in_each_pass_is_done_each_time(in_place):
    def op(layer, shared, own):
        out = shared @ own[layer]
        return (out, own) if in_place else out

    operands = jnp.ones((8, 32)), [jnp.ones((32, 16)), jnp.zeros((32, 16))]
    program = kernels.lowered(op, operands, layers=2, in_place=in_place, passes=3).compile()
    assert program.as_text().count(" dot(") == 6
