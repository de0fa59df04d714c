"""A model divided among virtual CPU devices computes what one device does (docs: invariant 10).

How many devices there are is settled when jax starts, so `tests/parallel/test_sharding.py` runs this file in a process
of its own. One device is what is expected: texts in every mode, log-probabilities, and what the caches hold afterwards.
Quantised models are in `tests/support/several_devices_quantised.py`, and parts of programs in
`tests/support/several_devices_parts.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxspec
from jaxspec import LLM, EngineConfig, SamplingParams, StructuredOutput
from jaxspec.bench import host
from jaxspec.bench.plan import planned
from jaxspec.cache.memory_plan import MemoryPlan
from jaxspec.checkpoint import ModelFolder
from jaxspec.compiling.lowering import Given, Process
from jaxspec.compiling.lowering_process import lowering_of
from jaxspec.engine import defaults
from jaxspec.engine.runner import Runner
from jaxspec.models.description import Decoder, Mamba2
from jaxspec.models.families import MODELS
from jaxspec.models.local import local
from jaxspec.models.memory import Recurrence
from jaxspec.pallas import hopper
from jaxspec.parallel.peers import Peers, Workspaces
from jaxspec.scheduling.audit import audit
from tests.drafters import test_mtp_layouts as mtp_layouts
from tests.engine.test_reported import run as reported
from tests.support import heads, hybrids, widths
from tests.support.tiny import BYTE_VOCAB, GEMMA4_ALL, tiny_checkpoint, tiny_config

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
VOCAB = BYTE_VOCAB  # 259, which no number of devices divides
DENSE = ("gemma3", "glm4", "llama", "mistral", "qwen2", "qwen3")
SIZES = (2, 4, 8)
# Sizes that eight devices divide, KV heads repeated on four and eight of them.
EIGHT = dict(num_attention_heads=8, intermediate_size=64, moe_intermediate_size=32)
WIDE = dict(hidden_size=1024, intermediate_size=2048, num_attention_heads=8, num_key_value_heads=4, head_dim=128)
WIDE |= dict(num_hidden_layers=1)
HYBRID = dict(linear_num_key_heads=8, linear_num_value_heads=16, shared_expert_intermediate_size=16)

greedy = functools.partial(SamplingParams, temperature=0.0, seed=0, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5, 1, 2, 3], [7], list(range(40)), [5, 6] * 12, [*list(range(40)), 9]]
BATCHES = {
    "greedy": [greedy(max_tokens=n) for n in (24, 20, 28, 1, 24)],
    "sampled": [
        greedy(max_tokens=10),
        SamplingParams(temperature=0.9, top_p=0.9, max_tokens=12, seed=3, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=20, max_tokens=9, seed=4, repetition_penalty=1.2, ignore_eos=True),
        SamplingParams(temperature=0.7, min_p=0.05, max_tokens=12, seed=5, presence_penalty=0.5, ignore_eos=True),
        SamplingParams(temperature=1.2, max_tokens=7, seed=2**40, logit_bias={3: 2.0}, ignore_eos=True),
    ],
    "logprobs": [
        SamplingParams(temperature=0.9, seed=i, max_tokens=6, logprobs=3, prompt_logprobs=i % 2, ignore_eos=True)
        for i in range(5)
    ],
}
# Programs for log-probabilities sample, too, so that one kind of batch compiles the fewest; then from the cache. Texts
# are as long as greedy ones.
SAMPLE = [
    dataclasses.replace(params, logprobs=3, prompt_logprobs=i % 2 or None, max_tokens=greedy.max_tokens)
    for i, (params, greedy) in enumerate(zip(BATCHES["sampled"], BATCHES["greedy"], strict=True))
]
SAMPLE = {"cold": SAMPLE, "cached": SAMPLE}
MODES = {"temperature": 0.0}, {}, {"logprobs": 1}  # a program each
STRUCTURED = [
    greedy(max_tokens=12, structured=StructuredOutput(regex="(yes|no|maybe), [0-9]{3}")),
    SamplingParams(temperature=1.0, seed=5, max_tokens=12, structured=StructuredOutput(regex="[a-c]{2,9}")),
]


def checkpoint(family: str, **more) -> Path:
    """A tiny model of this family whose every part eight devices divide."""
    if family == "gpt_oss":
        return tiny_checkpoint(family, VOCAB, 2, tokenizer=True, num_attention_heads=8)
    more |= HYBRID if family.startswith(("qwen3_5", "qwen3_next", "qwen4")) else {}
    more |= {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    return tiny_checkpoint(family, VOCAB, 2, tokenizer=True, **EIGHT | more)


def engine(folder: Path, draft: str, size: int, **options) -> LLM:
    """Four slots, and fewer pages than they may fill, so that requests are preempted."""
    more = {"num_draft_tokens": 3} if draft != "none" else {}
    more |= {"max_running_requests": 4, "context_length": 96, "page_size": 8, "max_total_tokens": 112}
    more |= {"dtype": "float32", "skip_warmup": True, "few_programs": True, "chunked_prefill_size": 32}
    return LLM(str(folder), draft, tp_size=size, **more | options)


def said(llm: LLM, batch: list[SamplingParams], prompts=PROMPTS) -> tuple[list[list[int]], list[float]]:
    """Each prompt's text with the tokens of the prompt that were scored, and all log-probabilities."""
    outs = llm.generate(prompts, batch)
    audit(llm.engine.scheduler)
    scored = [[*(out.prompt_logprobs or ()), *(out.completions[0].logprobs or ())] for out in outs]
    scored = [[each for each in of if each is not None] for of in scored]
    tokens = [
        [*out.completions[0].token_ids, *(each.token_id for each in of)] for out, of in zip(outs, scored, strict=True)
    ]
    return tokens, [each.logprob for of in scored for each in of]


def held(llm: LLM) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(llm.engine.runner.state)]


def runs(llm: LLM, structured: bool, sample=False) -> Iterator[tuple[str, tuple, list[np.ndarray]]]:
    """Run one batch after the other: its name, the engine's answers and the state after it."""
    for name, batch in (SAMPLE if sample else BATCHES).items():
        yield name, said(llm, batch), held(llm)
    if structured:
        yield "structured", said(llm, STRUCTURED, PROMPTS[:2]), held(llm)


@functools.cache
def expected(folder: Path, draft: str, structured: bool, sample=False, **options) -> tuple[MemoryPlan, list]:
    """One device's memory plan, and what it says."""
    llm = engine(folder, draft, 1, **options)
    return llm.engine.runner.plan, list(runs(llm, structured, sample))


def check(folder: Path, draft: str, size: int, structured=False, groups=1, sample=False, **options) -> LLM:
    """Texts are one device's. Each array of the state is what its shards make together, heads that several devices
    have counted once."""
    several = widths.several(lambda: engine(folder, draft, size, ep_size=groups, **options))
    _, of_one = expected(folder, draft, structured, sample, **options)
    said_by_several = runs(several, structured, sample)
    for (name, (texts, logprobs), state), (_, own, shards) in zip(of_one, said_by_several, strict=True):
        assert own[0] == texts, name
        np.testing.assert_allclose(own[1], logprobs, atol=2e-4)
        for whole, gathered in zip(state, shards, strict=True):
            gathered = gather(gathered, whole.shape, several.engine.runner.model.config.decoder, size)
            np.testing.assert_allclose(gathered.astype(np.float64), whole.astype(np.float64), atol=2e-4)
    return several


def gather(x: np.ndarray, shape: tuple[int, ...], decoder: Decoder, size: int) -> np.ndarray:
    """The array of one device, of this shape, from the shards of several side by side: their repeated heads once, and
    the convolution's channels, of each part of which each device has some, in order."""
    whole, own = channels(decoder), channels(local(decoder, size))
    if whole and shape and (shape[-1], x.shape[-1]) == (sum(whole), size * sum(own)):
        parts = np.split(x.reshape(*shape[:-1], size, -1), np.cumsum(own)[:-1], axis=-1)
        once = [part[..., :: size * n // m, :] for part, n, m in zip(parts, own, whole, strict=True)]
        x = np.concatenate([part.reshape(*shape[:-1], -1) for part in once], axis=-1)
    for axis, (a, b) in enumerate(zip(shape, x.shape, strict=True)):
        x = np.take(x, np.arange(a) * (b // a), axis=axis)
    return x


def channels(decoder: Decoder) -> tuple[int, ...]:
    """Widths of the parts that a recurrent layer's convolution has, in order."""
    mixing = next((layer.mixing for layer in decoder.layers if isinstance(layer.mixing.memory, Recurrence)), None)
    if mixing is None:
        return ()
    rule = mixing.memory
    keys, values = rule.key_heads * rule.key_dim, rule.value_heads * rule.value_dim
    return (values, keys, keys) if isinstance(mixing, Mamba2) else (keys, keys, values)


def exchanges(llm: LLM, kind: str) -> Counter:
    """How often each kind of exchange is in the program of a kind, once compiled."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return Counter(re.findall(rf" ({kinds})(?:-start)?\(", program(llm, kind).as_text()))


def program(llm: LLM, kind: str):
    (found,) = [each for (name, _), each in llm.engine.runner.programs._compiled.items() if name == kind]
    return found


def test_llama_with_an_eagle_drafter_over_two_devices(monkeypatch):
    """A sample of what the tests below take in every combination, with what programs of several devices look like."""
    folder, drafts = checkpoint("llama", num_hidden_layers=1), 2
    draft = f"eagle3:{eagle3(folder, (0, 0))}"
    reads = Counter()
    stored = ModelFolder.stored

    def counting(self, *of):
        found = stored(self, *of)
        reads.update((self.path, name) for name in found)
        return found

    monkeypatch.setattr(ModelFolder, "stored", counting)
    options = {"num_draft_tokens": drafts, "max_total_tokens": 88}
    several = check(folder, draft, 2, sample=True, **options)
    assert set(reads.values()) == {2}, "each of two engines reads each tensor once"
    # Two of the layer and one of embeddings; the drafter's layer: with the drafts after the first, with what stands.
    assert exchanges(several, "round_logprobs")["all-reduce"] == 2 + 1 + 3 * (drafts - 1) + 3
    runner = several.engine.runner
    kept = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(runner.state))
    assert (
        program(several, "round_logprobs").memory_analysis().alias_size_in_bytes == kept
    )  # the state is updated in place
    shards = [x.addressable_shards[0].data.nbytes / x.nbytes for x in jax.tree.leaves(runner.model.params)]
    assert min(shards) == 0.5
    stats = several.engine.stats()
    assert stats["preemptions_total"] and stats["cached_tokens_total"]  # what the batches are there for
    assert stats["sums"] == "by XLA's psum: the device is a CPU"
    plan, _ = expected(folder, draft, False, True, **options)
    assert runner.plan.weight_bytes < 0.55 * plan.weight_bytes
    assert runner.plan.kv_bytes == plan.kv_bytes / 2
    assert "of each of 2 devices" in str(runner.plan)


def eagle3(folder: Path, layers: tuple[int, int] = (0, 1)) -> Path:
    return heads.random_eagle3(folder, tuple(range(3, VOCAB, 2)), layers)


def test_what_cannot_be_divided_is_refused_by_name():
    model = str(checkpoint("llama"))
    for size, draft, more, words in (
        (3, "none", {}, ["--tp-size 3", "8 query heads", "1, 2, 4, 8"]),
        (16, "none", {}, ["--tp-size 16", "8 devices"]),
        (2, "none", {"ep_size": 2}, ["--ep-size 2", "has none"]),
        (2, "tests.support.engines:CountUp", {}, ["--tp-size 2", "CountUp"]),
        (2, "ngram+tests.support.engines:CountUp", {}, ["--tp-size 2", "CountUp"]),
    ):
        with pytest.raises(jaxspec.ConfigError) as error:
            LLM(model, draft, tp_size=size, skip_warmup=True, **more)
        assert all(word in str(error.value) for word in words), (draft, str(error.value))


@pytest.mark.exhaustive
def test_a_program_that_another_process_lowered_computes_the_same_bits():
    runner = engine(checkpoint("llama"), "ngram", 2).engine.runner
    programs, one = runner.programs, ("round_greedy", runner.shapes.batches[-1])
    process = Process(Given.of(programs.made_of(), runner.state, "auto", None).packed())
    process.come_up()
    module = process.lower(one)
    process.stop()
    arguments, results = programs._arguments(*one, runner.state), []
    for lowered, _ in (module.lower(arguments, 2), programs._lower(*one, runner.state)):
        program = lowered.compile()
        state, packed = jax.tree.map(jax.numpy.copy, runner.state), programs.padding(one[1])
        results.append(program(*arguments[:2], state, packed))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert getattr(a, "sharding", None) == getattr(b, "sharding", None)
        np.testing.assert_array_equal(a, b)


@pytest.mark.exhaustive  # sums lower in test_peer_sum.py, and whole programs in test_lowering.py
def test_a_gpus_program_is_lowered_without_devices(monkeypatch, tmp_path):
    """With sums through peers' memory, and kernels in each device's part."""
    monkeypatch.setattr(defaults, "here", lambda: defaults.GPU)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama", **WIDE)))
    options = dict(load_format="dummy", dtype="bfloat16", skip_warmup=True, max_total_tokens=2048, tp_size=2)
    made = Runner(EngineConfig(model=str(tmp_path), max_running_requests=8, **options))
    division = made.programs.division
    table, rank = np.zeros((2, 2), np.int32), np.arange(2, dtype=np.int32)
    where = [NamedSharding(division.mesh, spec) for spec in (PartitionSpec(), PartitionSpec("tp"))]
    theirs = Peers(*map(jax.device_put, (table, rank), where))
    made.programs.division = dataclasses.replace(division, workspaces=Workspaces(None, theirs))
    given = Given.of(made.programs.made_of(), made.state, "auto", 132).packed()
    try:
        module = lowering_of(pickle.loads(given))(("round_greedy", 8))
    finally:
        hopper.lower_for(None)
    assert {"peer_sum", "decode_attention"} <= module.kernels.keys()
    assert {kernel.name for kernel in module.alone} >= {"peer_sum", "decode_attention"}
    assert jax.export.deserialize(bytearray(module.exported)).nr_devices == 2


def test_a_model_loaded_for_one_device_is_refused():
    with pytest.raises(jaxspec.ConfigError, match="loaded for 1 device"):
        Runner(EngineConfig(tp_size=2), jaxspec.load_model(str(checkpoint("llama")), progress=False))
    with pytest.raises(jaxspec.ConfigError, match="tp_size=2; these functions run on one device"):
        jaxspec.logits(jaxspec.load_model(str(checkpoint("llama")), progress=False, tp_size=2), [[1, 2]])


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", sorted(MODELS))
def test_each_family_with_ngrams(family, size):
    planned_alike(check(checkpoint(family), "ngram", size, structured=True))


def planned_alike(llm: LLM) -> None:
    """`bench plan` counts what each device has."""
    config, real = llm.engine.runner.config, llm.engine.runner.plan
    options = dataclasses.replace(config, tp_size=1, load_format="dummy")
    made = planned(options, config.tp_size, defaults.CPU, None).plan
    names = "weight_bytes", "kv_bytes", "states"
    assert [getattr(made, name) for name in names] == [getattr(real, name) for name in names]


@pytest.mark.exhaustive
@pytest.mark.parametrize("draft,size", [("none", 4), ("eagle3", 2)])
def test_state_space_layers_that_share_a_group(draft, size):
    folder = checkpoint("granitemoehybrid")
    check(folder, f"eagle3:{eagle3(folder)}" if draft == "eagle3" else draft, size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", SIZES[:2])
def test_a_family_of_gemma4_with_inputs_experts_and_shared_keys(size):
    check(checkpoint("gemma4", vocab_size_per_layer_input=VOCAB, **GEMMA4_ALL), "ngram", size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", SIZES[:2])
@pytest.mark.parametrize("target,assistant", [("gemma4-tied", "dense"), ("gemma4-inputs", "ordered")])
def test_a_drafter_over_the_targets_own_keys(target, assistant, size):
    check(GOLDEN / "checkpoints" / target, f"assistant:{GOLDEN / 'assistants' / assistant}", size)


BLOCKS = ("dflash/full", "dflash/sliding", "dflash/window", "dflash2/sliding", "dflash2/causal")
BLOCKS += ("dspark/deepspec", "dspark/specforge", "dspark/speculators", "dspark/masks")
BLOCKS += ("lilicorr/plain", "lilicorr/convolved", "domino/shifted", "domino/speculators")
LAYERS = ("none", "suffix", "standalone", "eagle", "eagle3", "eagle3-own", "suffix+eagle", "suffix+eagle3")
TREES = ("eagle", "eagle3", "dflash/full", "dflash/window")


@pytest.mark.exhaustive
@pytest.mark.parametrize("draft,size", [
    *((draft, size) for draft in LAYERS for size in SIZES),
    *((draft, size) for draft in (*BLOCKS, "ngram+dspark/deepspec") for size in SIZES[:2]),  # their heads are four
])  # fmt: skip
def test_each_drafter(draft, size):
    check(*with_drafter(draft), size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("draft,size", [*((draft, size) for draft in TREES for size in SIZES[:2]), ("eagle", 8)])
@pytest.mark.parametrize("tree", [(2, 4, 4), (3, 2, 6), (1, 2, 2)], ids=str)
def test_trees(draft, size, tree):
    """Trees of so many steps, branches and drafts; with grammars too, which make a chain of what they force."""
    check(*with_drafter(draft), size, structured=not draft.startswith("dflash"), **tree_of(*tree))


def tree_of(steps: int, topk: int, drafts: int) -> dict[str, int]:
    return {"num_steps": steps, "topk": topk, "num_draft_tokens": drafts}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "draft", ["eagle", "mtp", "dflash/full", "dflash2/causal", "dspark/deepspec", "domino/shifted"]
)
def test_a_drafter_of_some_tokens(draft, tmp_path):
    """By a token map, whose tokens no number of devices divides; of tied and untied heads."""
    folder, draft = with_drafter(draft)
    (tmp_path / "map.json").write_text(json.dumps(list(range(1, 40, 2))))
    check(folder, draft, 4, draft_token_map=str(tmp_path / "map.json"))


def with_drafter(draft: str) -> tuple[Path, str]:
    """A target, and `--draft` for a drafter of this kind: for a block drafter, its method and the golden checkpoint."""
    lookup, joint, draft = draft.rpartition("+")
    folder = checkpoint("llama")
    if draft == "mtp":
        folder = hybrids.checkpoint("qwen3_next", VOCAB, 2, **EIGHT | HYBRID)
    elif draft == "eagle":
        folder = one_layer()
        draft = f"eagle:{heads.mimic(folder)}"
    elif draft.startswith("eagle3"):
        known = tuple(range(VOCAB) if draft == "eagle3-own" else range(3, VOCAB, 2))
        draft = f"eagle3:{heads.random_eagle3(folder, known, (0, 1))}"
    elif draft == "standalone":
        draft = f"standalone:{tiny_checkpoint('llama', VOCAB, 7, **EIGHT)}"
    elif "/" in draft:
        folder, draft = GOLDEN / "dflash" / "target", f"{draft.partition('/')[0]}:{GOLDEN / draft}"
    return folder, lookup + joint + draft


@pytest.mark.exhaustive
@pytest.mark.parametrize("draft", [
    *("ngram", "suffix", "standalone", "eagle", "eagle3", "dflash/full", "dflash2/sliding", "dspark/deepspec"),
    *("lilicorr/plain", "domino/shifted", "suffix+eagle"),
])  # fmt: skip
def test_rounds_of_fewer_drafts_of_each_drafter(draft, monkeypatch):
    folder, draft = with_drafter(draft)
    takes_turns(check(folder, draft, 2), expected(folder, draft, False)[1][0][1][0], monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", SIZES[:2])
@pytest.mark.parametrize("draft", ["eagle", "mtp", "dspark/deepspec"])
def test_rounds_that_share_their_rows_out(draft, size, monkeypatch):
    """Ragged rounds: by how often drafts were accepted, and by the drafter's own confidence."""
    folder, draft = with_drafter(draft)
    make = lambda size: widths.several(lambda: engine(folder, draft, size), ragged=True)  # noqa: E731
    texts = said(engine(folder, draft, 1), BATCHES["greedy"])[0]
    takes_turns(make(size), texts, monkeypatch, MODES[:2])


def takes_turns(llm: LLM, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch, modes=MODES) -> None:
    """Rounds of all, fewer and no drafts in turn say what one device does, whose rounds all have as many. The likeliest
    token alone, drawn or with its log-probability, is the greedy one."""
    widths.switch(llm, monkeypatch)
    likeliest = functools.partial(SamplingParams, temperature=1.0, top_k=1, ignore_eos=True)
    for more in modes:
        outs = llm.generate(PROMPTS, [likeliest(max_tokens=len(text), **more) for text in texts])
        audit(llm.engine.scheduler)
        assert [out.completions[0].token_ids for out in outs] == texts, more
    assert widths.took_turns(llm)


def one_layer() -> Path:
    """A target that an EAGLE drafter can mimic, so that most drafts are accepted."""
    return tiny_checkpoint("qwen3", VOCAB, 2, tokenizer=True, num_hidden_layers=1, **EIGHT)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", hybrids.FAMILIES)
def test_mtp_of_each_hybrid(family, size):
    check(hybrids.checkpoint(family, VOCAB, 2, **EIGHT | HYBRID), "mtp", size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", [*mtp_layouts.FAMILIES, "qwen4_exp"])
def test_mtp_of_each_layout(family):
    check(mtp_layouts.checkpoint(family, VOCAB), "mtp", 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family,draft,size,groups", [
    ("qwen3_moe", "ngram", 4, 2),
    ("qwen3_moe", "none", 4, 4),
    ("qwen3_moe", "eagle3", 2, 1),
    ("gpt_oss", "ngram", 4, 2),
    ("llama4", "ngram", 4, 2),
    ("qwen3_next", "mtp", 4, 2),
    ("qwen3_5_moe", "mtp", 2, 2),
])  # fmt: skip
def test_experts_divided_among_groups(family, draft, size, groups):
    with_mtp = functools.partial(hybrids.checkpoint, family, VOCAB, 2, **EIGHT | HYBRID)
    folder = with_mtp() if draft == "mtp" else checkpoint(family)
    several = check(folder, f"eagle3:{eagle3(folder)}" if draft == "eagle3" else draft, size, groups=groups)
    stacks = several.engine.runner.model.params["layers"][0]["experts_down"].values
    held, _, columns = stacks.addressable_shards[0].data.shape
    mixture = several.engine.model_config.decoder.mixture
    assert (held, columns) == (mixture.experts // groups, mixture.width * groups // size)


@pytest.mark.exhaustive
def test_nothing_compiles_after_warm_up():
    """Warm-up times rounds of all drafts and of none, too."""
    options = {"skip_warmup": False, "few_programs": False, "num_continuous_decode_steps": 2}
    llm = engine(checkpoint("llama"), "ngram", 4, **options)
    assert {tuple(times) for times in llm.engine.runner.round_times.values()} == {(0, 3)}
    compiled = llm.engine.runner.compiles["compiles"]
    list(runs(llm, structured=True))
    assert llm.engine.runner.compiles["compiles"] == compiled


@pytest.mark.exhaustive
def test_dummy_weights_are_one_devices():
    check(checkpoint("qwen3_next"), "mtp", 2, load_format="dummy")


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{"num_continuous_decode_steps": 4}, {"disable_overlap": True}], ids=str)
def test_several_rounds_in_a_program_and_no_overlap(options):
    check(checkpoint("qwen3"), "ngram", 4, **options)


@pytest.mark.exhaustive
def test_host_time_is_that_of_rounds_over_all_devices():
    """`bench host --tp-size`: its empty programs are divided as the engine's own, and take as many arguments."""
    parser = argparse.ArgumentParser()
    host.add_arguments(parser)
    sizes = ["--prompt-tokens", "20", "--new-tokens", "12", "--context-length", "128"]
    made = host.make_engine(parser.parse_args([*sizes, "--requests", "3", "--tp-size", "4"]))
    assert host.Load(made, 20, 12, False).measure(3, rounds=20)["total"]["median_ms"] > 0
    empty = next(each for (kind, _), each in made.runner.programs._compiled.items() if kind == "round_greedy")
    given = jax.tree.leaves(empty.input_shardings[0])
    assert len(given) >= len(jax.tree.leaves((made.runner.model.params, made.runner.state)))
    assert {len(sharding.device_set) for sharding in given} == {4}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe"])
def test_rows_to_report(kind):
    reported(kind, "ngram", tp_size=2)
