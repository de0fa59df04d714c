"""Tables of implementations: which one computes a call, and that all of a table give the same arrays.

That they hold the same numbers each kernel's own tests show, interpreted.
"""

import functools
import logging
import math
import pkgutil
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxspec import cache, decoder, pallas, parallel
from jaxspec.bench.cases import make_cases
from jaxspec.decoder import matmul
from jaxspec.models.description import Norm, SigmoidScores
from jaxspec.models.fp8 import E4M3
from jaxspec.models.weights import Fp8, Int4, Mxfp4, Weight
from jaxspec.pallas import hopper, operation, portable
from jaxspec.pallas.attention.paged_attention import paged_attention
from jaxspec.pallas.experts.experts_mlp import experts_mlp
from jaxspec.pallas.experts.scored_experts import Routing, scored_experts
from jaxspec.pallas.hopper import export
from jaxspec.pallas.operation import ANY, HOPPER, PORTABLE, Implementation, Table, choose, nothing
from scripts.kernels_table import index
from tests.support.sample import rare

TABLE = (
    Implementation("fast", HOPPER, lambda x: "odd" if x % 2 else None, lambda x: x),
    Implementation("unseen", PORTABLE, nothing, lambda x: x, requested=True),
    Implementation("portable", PORTABLE, lambda x: "large" if x > 9 else None, lambda x: x),
    Implementation("exact", ANY, lambda x: None if x == 3 else "not three", lambda x: x),
    Implementation("reference", ANY, nothing, lambda x: x, slow=True),
)


@pytest.fixture
def on(monkeypatch):
    def device(kernels: str | None):
        monkeypatch.setattr(hopper, "kernels_here", lambda: None if kernels == HOPPER else "no Hopper")
        monkeypatch.setattr(portable, "kernels_here", lambda: None if kernels == PORTABLE else "no Triton")

    operation.warn.cache_clear()
    yield device
    operation.warn.cache_clear()


@pytest.mark.parametrize("device,asked,call,name", [
    (HOPPER, "auto", 2, "fast"),
    (HOPPER, "auto", 1, "reference"),
    (HOPPER, "auto", 3, "exact"),
    (PORTABLE, "auto", 2, "portable"),
    (PORTABLE, "portable", 2, "unseen"),
    (PORTABLE, "auto", 10, "reference"),
    (None, "auto", 2, "reference"),
])  # fmt: skip
def test_the_first_that_runs_here_and_takes_the_call(device, asked, call, name, on):
    on(device)
    with hopper.use_kernels(asked):
        assert choose("counting", TABLE, call).name == name
        assert next(each for each in TABLE if each.takes(call)).name == name


def test_a_device_with_kernels_warns_once_that_none_takes_a_call(on, caplog):
    on(HOPPER)
    for call in (1, 5, 1, 2, 3):
        choose("counting", TABLE, call)
    assert [record.getMessage() for record in caplog.records] == [
        "counting runs in plain jax.numpy, which is slow (fast: odd)"
    ]
    on(PORTABLE)
    choose("counting", TABLE, 10)
    assert caplog.records.pop().getMessage().endswith("(portable: large)")
    on(None)
    choose("counting", TABLE, 12)
    assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.WARNING


def test_a_call_that_nothing_takes_is_an_error(on):
    on(HOPPER)
    with pytest.raises(NotImplementedError, match="nothing here computes counting; fast: odd"):
        choose("counting", TABLE[:-1], 1)


def test_docs_index_every_kernel():
    docs = (Path(__file__).parent.parent.parent / "docs" / "kernels.md").read_text()
    assert index() in docs, "run `python -m scripts.kernels_table`"
    untested = [line for line in index().splitlines()[2:] if line.split("|")[4].strip() == "-"]
    assert [line.split("`")[1] for line in untested] == [
        "pallas/recurrence/intra_chunk.py"
    ]  # delta_chunk's tests run it


@functools.cache
def tables() -> dict[str, Table]:
    """Every table of jaxspec, by its name and that of its module."""
    modules = []
    for folder in (pallas, decoder, parallel, cache):
        modules += [each.name for each in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}.")]
    named = [(f"{module}.{name}", each) for module in modules for name, each in vars(import_module(module)).items()]
    return {name: each for name, each in named if _is_table(each) and "._" not in name}


def _is_table(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(each, Implementation) for each in value)


@pytest.mark.parametrize("name", tables())
def test_a_table_is_in_order_and_its_last_line_takes_all(name):
    names, devices = zip(*((each.name, each.device) for each in tables()[name]), strict=True)
    assert len(set(names)) == len(names)
    assert sorted(devices, key=(HOPPER, PORTABLE, ANY).index) == list(devices)
    *others, last = tables()[name]
    assert last.device == ANY and last.refuses is nothing
    assert not any(each.slow for each in others)
    assert not last.slow or devices[0] == HOPPER, "nobody is told that Hopper runs the slow one: it has no kernel"


def bfloat16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def float32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def int32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def in_fp8(outputs: int, inputs: int, *experts: int, activations: bool = False) -> Weight:
    values = jax.ShapeDtypeStruct((*experts, outputs, inputs), E4M3)
    return Weight(values, Fp8(128, activations), scales=float32(*experts, outputs // 128, inputs // 128))


def in_mxfp4(outputs: int, inputs: int, experts: int) -> Weight:
    values = jax.ShapeDtypeStruct((experts, outputs, inputs // 2), jnp.uint8)
    return Weight(values, Mxfp4(), scales=jax.ShapeDtypeStruct((experts, inputs // 32, outputs), jnp.uint8))


def in_int4(outputs: int, inputs: int, *experts: int) -> Weight:
    values = jax.ShapeDtypeStruct((*experts, outputs, inputs // 2), jnp.uint8)
    return Weight(values, Int4(128), scales=bfloat16(*experts, inputs // 128, outputs))


def mixture(tokens: int, each: int, gate_up: Weight, down: Weight) -> list:
    return [experts_mlp, bfloat16(tokens, down.outputs), [(gate_up, down)], int32(tokens, each), float32(tokens, each)]


def gelu_mixture(tokens: int) -> list:
    """Gemma 4 26B-A4B's."""
    weights = (Weight(bfloat16(128, *shape)) for shape in ((1408, 2816), (2816, 704)))
    return [partial(experts_mlp, gating=matmul.gating("gelu_tanh")), *mixture(tokens, 8, *weights)[1:]]


def later_attention(rows: int) -> list:
    pages = bfloat16(2, 17, 2, 8, 64, 128), int32(), int32(8, 16), int32(8)
    run = lambda *of: paged_attention(*of[:-1], last=of[-1])  # noqa: E731
    return [run, bfloat16(8, rows, 32, 128), *pages, int32(8, rows)]


def fixed_attention(rows: int) -> list:
    pages = bfloat16(2, 17, 2, 8, 64, 128), int32(), int32(8, 16), int32(8)
    return [partial(paged_attention, fixed=1024), bfloat16(8, rows, 32, 128), *pages]


SERVED = """decode attention 8 x 1024, 4 rows
decode attention 2 x 8192, 1 row, window 1024
decode attention 8 x 1024, 4 rows, FP8 KV
prompt attention 16 x 512
prompt attention 1 x 8192, window 1024
latent attention 8 x 4096, 4 rows, 16 heads
picture attention 1024 x 1024
cache write 1 x 1024
cache write 1 x 1024, FP8 KV
heads 8 x 1024, 4 rows
prompt heads 16 x 512
experts 30B-A3B, 4 tokens
experts 35B-A3B, 1024 tokens
router 35B-A3B, 8 tokens
convolution 8 x 4 rows
convolution prompts 16 x 512
gated delta 8 x 4 rows
gated delta prompts 16 x 512
state space 8 x 4 rows
state space prompts 16 x 512
gate, up, 512 rows
down, 512 rows
FP8 gate, up, 32 rows
FP8 gate, up, 512 rows
FP8 x FP8 down, 128 rows
FP8 x FP8 by tensor out, 2048 rows""".splitlines()  # of the benchmark's cases
MORE = {  # what the benchmark has no case of
    "FP8 experts of Qwen3-30B-A3B, 4 tokens": mixture(4, 8, in_fp8(1536, 2048, 128), in_fp8(2048, 768, 128)),
    "FP8 experts of Qwen3-30B-A3B, 32 tokens": mixture(32, 8, in_fp8(1536, 2048, 128), in_fp8(2048, 768, 128)),
    "FP8 experts of Qwen3-30B-A3B, 2048 tokens": mixture(2048, 8, in_fp8(1536, 2048, 128), in_fp8(2048, 768, 128)),
    "experts of gpt-oss-20b": mixture(8, 4, in_mxfp4(5760, 2880, 32), in_mxfp4(2880, 2880, 32)),
    "int4 experts of Qwen3-30B-A3B, 8 tokens": mixture(8, 8, in_int4(1536, 2048, 128), in_int4(2048, 768, 128)),
    "experts of Gemma 4 26B-A4B, 4 tokens": gelu_mixture(4),
    "experts of Gemma 4 26B-A4B, 32 tokens": gelu_mixture(32),
    "GLM-4.5-Air's choice of experts": [
        partial(scored_experts, routing=Routing(8, True, SigmoidScores(), True)),
        bfloat16(8, 128), bfloat16(128), int32(8),
    ],
    "int4 gate, up, 8 rows": [matmul.project, bfloat16(8, 4096), in_int4(24576, 4096), int32(1)],
    "a round's attention to later rows": later_attention(4),
    "a prompt's attention to later rows": later_attention(64),
    "a round's attention in a fixed order": fixed_attention(4),
    "a prompt's attention in a fixed order": fixed_attention(64),
    "hidden states of three layers, side by side": [
        lambda weight, *rows: matmul.product(rows, weight), Weight(bfloat16(12288, 4096)), *[bfloat16(2, 4, 4096)] * 3,
    ],
    "a norm whose rows are quantised": [
        lambda weight, *of: matmul.normed_for([weight], *of, Norm(1e-6)),
        in_fp8(6144, 4096, activations=True), bfloat16(512, 4096), bfloat16(4096),
    ],
}  # fmt: skip
NAMES = {*SERVED, *MORE}
REPEATED = {  # whose implementations others run, too
    *("decode attention 8 x 1024, 4 rows", "decode attention 2 x 8192, 1 row, window 1024", "heads 8 x 1024, 4 rows"),
    *("decode attention 8 x 1024, 4 rows, FP8 KV", "prompt attention 16 x 512", "experts 35B-A3B, 1024 tokens"),
    *("prompt attention 1 x 8192, window 1024", "cache write 1 x 1024", "cache write 1 x 1024, FP8 KV"),
    *("gate, up, 512 rows", "FP8 x FP8 down, 128 rows", "FP8 experts of Qwen3-30B-A3B, 32 tokens"),
    *("experts of gpt-oss-20b", "experts of Gemma 4 26B-A4B, 4 tokens", "experts of Gemma 4 26B-A4B, 32 tokens"),
}
# Tables of whole layers' steps, whose tests are those of layers, and of sums, which take devices.
STEPS = "decoder.mixings.delta_rule.RULE", "decoder.mixture_rows.ROUTER", "decoder.forward.CONTEXT"
STEPS += "decoder.mixings.mamba2.SPACE", "decoder.mixings.mamba2.NORM", "decoder.post_norms.heads.HEADS"
STEPS += ("decoder.mixings.kimi_delta.RULE",)
ELSEWHERE = {f"jaxspec.{name}" for name in (*STEPS, "parallel.peers.SUM", "parallel.peers.SUM_IN_ORDER")}


@pytest.fixture
def compared(monkeypatch):
    """Let every operation run all implementations that take its call; their tables' names and theirs."""
    ran, names = set(), {id(table): name for name, table in tables().items()}

    def choose_all(_, table, *call):
        results = {each.name: each.run(*call) for each in table if each.refuses(*call) is None}
        for name, result in results.items():
            ran.add((names[id(table)], name))
            assert_alike(result, results[table[-1].name], name)
        return Implementation("the first", ANY, nothing, lambda *_: next(iter(results.values())))

    for module in [each for name, each in sys.modules.items() if name.startswith("jaxspec.")]:
        if vars(module).get("choose") is choose:
            monkeypatch.setattr(module, "choose", choose_all)
    monkeypatch.setattr(export._Lowered, "function", lambda self, name, call: call.run)  # traced, but not lowered
    return ran


def assert_alike(result, reference, name: str) -> None:
    """Padding may follow what the reference has, and a kernel may round before its caller would."""
    if isinstance(result, matmul.Quantised):
        result = result.values[: math.prod(result.shape[:-1])].reshape(result.shape)
    if isinstance(result, matmul.Weighted):
        result = result.rows
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(reference), strict=True)
    for one, other in pairs:
        assert one.ndim == other.ndim and all(a >= b for a, b in zip(one.shape, other.shape, strict=True)), name
        kinds = [jnp.issubdtype(each.dtype, jnp.floating) for each in (one, other)]
        assert one.dtype == other.dtype or all(kinds), name


@pytest.mark.parametrize("names", [NAMES - REPEATED, rare(NAMES)], ids=["each", "all"])
def test_all_implementations_give_the_same_arrays(compared, names):
    """At the sizes of models that are served; no array is made."""
    cases = {case.name: case for case in make_cases(small=False)}
    for case in [cases[name] for name in SERVED if name in names]:
        shared, own = jax.eval_shape(case.build, jax.eval_shape(lambda: jax.random.key(0)))
        jax.eval_shape(partial(case.op, 0), shared, own)
    for run, *operands in [MORE[name] for name in MORE if name in names]:
        jax.eval_shape(run, *operands)
    wanted = {(name, each.name) for name, table in tables().items() if name not in ELSEWHERE for each in table}
    assert wanted == compared
