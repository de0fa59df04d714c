"""The serve benchmark, against a server that runs and one that it starts itself."""

import itertools
import json

import pytest

from jaxspec import AsyncLLM
from jaxspec.bench import __main__ as bench
from jaxspec.bench import serve
from jaxspec.bench.client import Client
from server.app import create_app
from tests.server.live import as_here, serving
from tests.support.sample import rare

LOAD = ["--prompt-len", "20", "--output-len", "12", "--num-prompts", "6"]


def command(path, *argv):
    assert bench.main(["serve", *argv, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def url(tiny):
    options = {"model": tiny[1], "draft": "ngram", "context_length": 256, "chunked_prefill_size": 32}
    options |= {"max_running_requests": 3, "skip_warmup": True, "few_programs": True, "decode_log_interval": 0}
    llm = AsyncLLM(**options)
    try:
        with serving(create_app(llm)) as url:
            yield url
    finally:
        llm.close()


def test_random_prompts_at_two_concurrencies(url, tmp_path, capsys):
    document = command(tmp_path / "x.json", "--url", url, "--concurrency", "1,3", *LOAD)
    assert [row["concurrency"] for row in document["rows"]] == [1, 3]
    for row in document["rows"]:
        assert (row["completed"], row["failed"], row["prompt_tokens"]) == (6, 0, 120)
        assert row["output_tokens"] == 72  # end tokens end nothing here
        assert 1.0 <= row["accept_length"] <= 5.0
        for kind in ("ttft", "tpot", "itl", "e2e"):
            assert 0 < row[f"{kind}_p50_ms"] <= row[f"{kind}_p90_ms"] <= row[f"{kind}_p99_ms"]
        assert row["e2e_p50_ms"] > row["ttft_p50_ms"]
    assert document["facts"]["draft"] == "ngram" and document["facts"]["devices"] == ["cpu:0 cpu"]
    said = capsys.readouterr().out
    assert document["notes"][0] in said and "latencies, ms" in said


def test_programs_compiled_under_load_are_told(url, tmp_path, monkeypatch):
    argv = ["--url", url, "--concurrency", "2", *LOAD]
    told = lambda: command(tmp_path / "x.json", *argv)["notes"][0]  # noqa: E731
    told()  # without warm-up the first time may compile
    assert told().startswith("the server's compile counter stayed at")
    ask, count = Client.get, itertools.count(40)

    async def get(self, path):
        info = await ask(self, path)
        info["stats"]["compiles_total"] = next(count)
        return info

    monkeypatch.setattr(Client, "get", get)  # it is asked at the start, before the load, and after it
    assert told() == "the server's compile counter MOVED from 40 to 42 while it was under load"


def test_questions_at_a_rate(url, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "1+1?"}\n{"question": "2+2?"}\n')
    argv = ["--dataset", "gsm8k", "--data", str(tmp_path / "q.jsonl"), "--request-rate", "50", "--num-prompts", "5"]
    document = command(tmp_path / "x.json", "--url", url, "--concurrency", "3", "--output-len", "5", *argv)
    (row,) = document["rows"]
    assert row["load"] == "http 3, 50/s" and row["request_rate"] == 50 and row["completed"] == 5
    assert row["prompt_tokens"] > 5 * 4


def test_requests_start_at_random_times_of_that_rate():
    parser = bench.argparse.ArgumentParser()
    serve.add_arguments(parser)
    argv = ["--request-rate", "20", "--num-prompts", "4000", "--prompt-len", "1"]
    starts = serve.make_loads(parser.parse_args(argv), 100)[1].starts
    gaps = serve.np.diff(starts)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1) and gaps.std() == pytest.approx(1 / 20, rel=0.1)
    assert set(serve.make_loads(parser.parse_args(argv[2:]), 100)[1].starts) == {0.0}


def test_a_server_of_its_own_compared_with_the_engine_alone(tiny, tmp_path, monkeypatch):
    for name, value in as_here().items():
        monkeypatch.setenv(name, value)
    argv = [*tiny, "--draft", "ngram", "--concurrency", "3", *LOAD, "--via", "both", "--decode-log-interval", "0"]
    document = command(tmp_path / "x.json", *argv)
    http, offline = document["rows"]
    assert (http["via"], offline["via"]) == ("http", "offline")
    assert document["facts"]["engine"]["max_running_requests"] == 3 and document["facts"]["ready_s"] > 0
    for row in (http, offline):
        assert (row["completed"], row["prompt_tokens"], row["output_tokens"]) == (6, 120, 72)
    assert http["accept_length"] == offline["accept_length"]  # the same prompts, greedily
    assert offline["of_offline"] == http["output_tokens_per_s"] / offline["output_tokens_per_s"]


@pytest.mark.exhaustive  # beside a server, above
def test_an_engine_of_this_process_alone(tiny, tmp_path):
    argv = [*tiny, "--concurrency", "2", *LOAD, "--via", "offline", "--skip-warmup", "--few-programs"]
    document = command(tmp_path / "x.json", *argv, "--request-rate", "100")
    (row,) = document["rows"]
    assert row["load"] == "offline 2, 100/s" and (row["completed"], row["output_tokens"]) == (6, 72)
    assert "of_offline" not in row and document["facts"]["devices"] == ["cpu:0 cpu"]


@pytest.mark.parametrize("argv, said", [
    (["--url", "http://127.0.0.1:9"], "is the server running?"),
    (["--url", "http://127.0.0.1:9", "--via", "both"], "--via both needs the engine's flags"),
    (["--request-rate", "0"], "requests a second greater than 0"),
    (["--page-size", "0"], "--page-size must be an integer of at least 1"),
    rare(["--model", "no-such-model"], "the server ended with status 2 before it was ready"),
])  # fmt: skip
def test_what_cannot_work_is_a_usage_error(argv, said, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["serve", *argv])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_prompts_that_do_not_fit_fail_every_request(url, capsys):
    with pytest.raises(SystemExit):
        bench.main(["serve", "--url", url, "--concurrency", "1", "--prompt-len", "300", "--num-prompts", "2"])
    assert "every request failed; the first: status 400" in capsys.readouterr().err
