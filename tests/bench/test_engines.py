"""The benchmarks that run an engine, through the command, on a tiny model: what they measured is what they say."""

import argparse
import json

import jax
import numpy as np
import pytest

from jaxspec.bench import __main__ as bench
from jaxspec.bench import adaptive, decode, engines, prefill, results, traffic
from jaxspec.checkpoint import load_model
from jaxspec.compiling.ladder import ladder_of
from jaxspec.models.description import DeltaRule
from tests.bench.fake_engine import Clock, FakeEngine
from tests.support.tiny import tiny_checkpoint

PLANNED = ("weight_bytes", "draft_weight_bytes", "kv_bytes", "slot_bytes", "workspace_bytes")


def command(path, *argv):
    """Run a benchmark; its document."""
    assert bench.main([*argv, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def decoded(tiny, tmp_path_factory):
    """A decode benchmark with everything on. Its drafts are right by decree, then wrong by decree."""
    argv = ["decode", *tiny, "--draft", "ngram", "--accept-rates", "1,0.5,0", "--concurrency", "1,3"]
    argv += ["--prompt-len", "20", "--output-len", "100", "--overlap", "both", "--back-to-back"]
    serve, overlapped = decode.Load.run, []

    def run(self, *args):
        overlapped.append(not self._engine.config.disable_overlap)
        return serve(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode.Load, "run", run)
        document = command(tmp_path_factory.mktemp("decode") / "decode.json", *argv)
    assert overlapped == [False, False, True, True] * 2  # without warm-up each runs twice
    return document


def test_decode_runs_every_load_with_overlap_off_and_on(decoded):
    assert [(row["concurrency"], row["overlap"]) for row in decoded["rows"]] == [
        (1, "off"),
        (1, "on"),
        (3, "off"),
        (3, "on"),
    ]
    for off, on in zip(decoded["rows"][::2], decoded["rows"][1::2], strict=True):
        assert off["overlap_gain"] is None and on["overlap_gain"] == off["mean_ms"] / on["mean_ms"] - 1
    assert not decoded["notes"]


@pytest.mark.exhaustive  # that nothing is compiled under load is below
def test_what_a_load_meets_is_compiled_ahead(tiny, tmp_path):
    """Side by side, not one after the other as they are met; and little besides."""
    argv = [*tiny[:-1], "--draft", "ngram", "--max-running-requests", "4", "--concurrency", "3", "--prompt-len", "20"]
    parser = argparse.ArgumentParser()
    decode.add_arguments(parser)
    args = parser.parse_args(argv)
    engine = engines.start(args, results.Result("decode", argv, args, decode.TABLES[0], None), 4)
    engines.compile_ahead(engine, args.temperature, 3, args.prompt_len)
    ready = engine.runner.programs.ready
    assert ready < len(ladder_of(engine.runner.shapes)) / 3
    decode.Load(engine, np.random.default_rng(0), 3, 20).run(30, back_to_back=True)
    assert engine.runner.programs.ready == ready


def test_decode_samples_at_the_temperature_given(tiny, capsys):
    assert decode.Load(None, None, 1, 20, 0.7).params(5).temperature == 0.7
    with pytest.raises(SystemExit):
        bench.main(["decode", *tiny, "--temperature", "-1"])
    assert "temperature must be a number from 0 to 100, got -1" in capsys.readouterr().err


def test_decode_accepts_at_the_rates_given(decoded):
    assert decoded["facts"]["width"] == 4 and decoded["facts"]["expected_accept_length"] == 2.5
    for row in decoded["rows"]:
        assert 2.0 < row["accept_length"] < 3.0  # the first draft always, the second half the time, the third never
        assert row["tokens_per_s"] == pytest.approx(
            row["concurrency"] * row["accept_length"] / row["mean_ms"] * 1e3, rel=0.05
        )


def test_decode_counts_its_floor_at_the_context_it_had(decoded):
    for row in decoded["rows"]:
        assert 40 < row["context"] < 110  # 20 of prompt, and half of those generated meanwhile
        assert row["floor_ms"] == row["bytes"] / 4.3e12 * 1e3  # nothing here is bound by arithmetic
        assert row["ratio"] == row["ms_per_round"] / row["floor_ms"] > 1


def test_decode_times_the_program_by_itself_and_nothing_is_compiled_meanwhile(decoded):
    for row in decoded["rows"]:
        assert row["program_ms"] > 0 and row["engine_overhead"] == row["mean_ms"] / row["program_ms"] - 1
        assert row["compiles"] == 0 and row["preemptions"] == 0


def test_decode_says_when_there_was_nothing_to_time(tiny, tmp_path):
    argv = ["decode", *tiny, "--draft", "ngram", "--accept-rates", "1,0.5,0", "--concurrency", "3"]  # as above
    argv += ["--prompt-len", "30", "--output-len", "6"]
    document = command(tmp_path / "x.json", *argv)
    assert document["rows"][0]["ms_per_round"] is None and document["rows"][0]["run_tokens_per_s"] > 0
    assert "raise --output-len 6" in document["notes"][0]


def test_prefill(tiny, tmp_path):
    argv = ["prefill", *tiny, "--lengths", "20,64", "--batched-tokens", "128", "--repeats", "3"]
    document = command(tmp_path / "x.json", *argv)
    short, long = document["rows"]
    assert (short["length"], short["batch"], long["length"], long["batch"]) == (20, 6, 64, 2)
    for row in document["rows"]:
        assert 0 < row["floor_ms"] < row["ttft_min_ms"] <= row["ttft_ms"] <= row["ttft_max_ms"]
        assert sorted(row["ttft_each_ms"])[1] == row["ttft_ms"]
        assert row["batch_ratio"] == pytest.approx(row["batch_floor_tokens_per_s"] / row["batch_tokens_per_s"])
        assert row["in_use_growth_mb"] is None and row["peak_growth_mb"] is None  # a CPU doesn't say
    assert not document["notes"]


@pytest.mark.exhaustive
def test_prefill_compares_a_hybrid_with_attention_in_all_its_layers(tmp_path):
    sizes = ["--context-length", "256", "--chunked-prefill-size", "32", "--skip-warmup", "--few-programs"]
    argv = ["prefill", "--model", str(tiny_checkpoint("qwen3_5")), *sizes, "--lengths", "20,64"]
    document = command(tmp_path / "x.json", *argv, "--batched-tokens", "64", "--repeats", "3", "--attention-only")
    own, other = document["rows"][:2], document["rows"][2:]
    assert [row["layers"] for row in document["rows"]] == ["own"] * 2 + ["attention only"] * 2
    assert [row["length"] for row in other] == [row["length"] for row in own] == [20, 64]
    for row, attending in zip(own, other, strict=True):
        assert row["ttft_ms"] > 0 and attending["ttft_ms"] > 0 and row["flops"] != attending["flops"]
    times = other[1]["ttft_ms"] / own[1]["ttft_ms"]
    assert document["notes"][1].startswith(f"prompts of 64: attention only takes {times:.2f} times as long")


def test_attention_only_keeps_all_but_the_mixing_of_linear_layers():
    model = load_model(str(tiny_checkpoint("qwen3_5_moe")), load_format="dummy")
    made = engines.attention_only(model)
    own, layers = model.params["layers"], made.params["layers"]
    linear = [i for i, layer in enumerate(model.config.decoder.layers) if isinstance(layer.mixing, DeltaRule)]
    (full,) = {0, 1} - {*linear}
    assert made.config.num_kv_layers == 2 and layers[full] is own[full]
    for i in linear:
        assert layers[i].keys() == own[full].keys()
        assert layers[i]["qkv"] is own[full]["qkv"] and layers[i]["experts_down"] is own[i]["experts_down"]


def test_attention_only_needs_a_hybrid(tiny, capsys):
    with pytest.raises(SystemExit):
        bench.main(["prefill", *tiny, "--lengths", "20", "--attention-only"])
    assert "has no linear attention to compare with" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_prefill_says_how_memory_grew_and_what_was_planned(tiny, tmp_path, monkeypatch):
    """A device whose memory in use grows by a megabyte whenever it is asked, which a CPU doesn't say."""
    used = iter(range(10**9, 2 * 10**9, 10**6))
    stats = lambda: {"bytes_in_use": (now := next(used)), "peak_bytes_in_use": 2 * now}  # noqa: E731
    growing = lambda: {"bytes_limit": 10**10} | stats()  # noqa: E731
    monkeypatch.setattr(prefill, "memory_facts", growing)
    monkeypatch.setattr(results, "memory_facts", growing)
    document = command(
        tmp_path / "x.json", "prefill", *tiny, "--lengths", "20,64", "--batched-tokens", "128", "--repeats", "1"
    )
    for row in document["rows"]:
        assert (row["in_use_growth_mb"], row["peak_growth_mb"]) == (1, 2)
    planned = sum(size for name, size in document["facts"]["memory_plan"].items() if name in PLANNED)
    assert document["notes"] == [f"at most 2.01 GB were in use, of {planned / 1e9:.2f} planned"]


def test_prefill_times_each_prompt_from_when_it_was_queued(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(traffic, "time", clock)
    engine = FakeEngine(clock)  # half a second, and one more for each prompt before
    times = prefill.Prompts(engine, np.random.default_rng(0)).serve(3, 10)
    assert times == pytest.approx([0.5, 1.5, 2.5])
    assert engine.counts.totals["generation_tokens"] == 3 and {len(prompt) for prompt in engine.prompts} == {10}


@pytest.mark.parametrize("argv, said", [
    (["--draft", "none", "--accept-rates", "0.5"], "--accept-rates needs a drafter"),
    (["--profile"], "--profile lists GPU kernels, and this is a cpu"),
    (["--accept-rates", "0.5,1.5"], "of numbers from 0 to 1"),
    (["--concurrency", "4", "--max-running-requests", "2"], "--max-running-requests 2 is less than 4 at once"),
    (["--bandwidth", "0"], "--bandwidth: must be a number above 0, got '0'"),
    (["--page-size", "0"], "--page-size"),
])  # fmt: skip
def test_what_cannot_work_is_a_usage_error(tiny, argv, said, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["decode", *tiny, "--concurrency", "1", *argv])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("argv, said", [
    (["decode", "--prompt-len", "250", "--output-len", "50"], "prompts of 250 tokens and 50 new ones"),
    (["structured", "--prompt-len", "250", "--output-len", "50"], "prompts of 250 tokens and 50 new ones"),
    (["adaptive", "--accept-rates", "0.5", "--draft", "ngram"], "prompts of 256 tokens and 128 new ones"),
    (["prefill", "--lengths", "16,256"], "prompts of 256 tokens and 1 new ones"),
    (["load", "--dataset", "shared-prefix", "--prefix-len", "9", "--prompt-len", "30-70", "--output-len", "180"],
     "prompts of 79 tokens and 180 new ones"),
    (["serve", "--dataset", "conversations", "--prefix-len", "0", "--prompt-len", "30", "--output-len", "20-40"],
     "prompts of 240 tokens and 40 new ones"),
])  # fmt: skip
def test_requests_beyond_the_context_are_refused_before_the_model_is_loaded(tiny, argv, said, capsys, monkeypatch):
    monkeypatch.setattr(engines, "load_target", None)
    monkeypatch.setattr(adaptive, "load_target", None)
    with pytest.raises(SystemExit):
        bench.main([*argv, *tiny[:4]])
    assert f"{said} exceed the context of 256" in capsys.readouterr().err


def test_the_device_is_claimed_before_anything_asks_for_it(monkeypatch, capsys):
    order = []
    backend = jax.default_backend()
    monkeypatch.setattr(bench, "claim_device", lambda: order.append("claimed"))
    monkeypatch.setattr(jax, "default_backend", lambda: order.append("asked") or backend)
    with pytest.raises(SystemExit):  # --profile wants a GPU
        bench.main(["decode", "--model", "any", "--profile"])
    assert order[:2] == ["claimed", "asked"] and "GPU kernels" in capsys.readouterr().err
