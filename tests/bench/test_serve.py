"""The serve benchmark, against a server that runs and one that it starts itself."""

import csv
import http.server
import itertools
import json
import threading

import pytest

from jaxspec import AsyncLLM
from jaxspec.bench import __main__ as bench
from jaxspec.bench import latency, serve
from jaxspec.bench.client import Client, Reply
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
        if path == "/server_info":
            info["stats"]["compiles_total"] = next(count)
        return info

    monkeypatch.setattr(Client, "get", get)  # it is asked at the start, before the load, and after it
    assert told() == "the server's compile counter MOVED from 40 to 42 while it was under load"


def test_questions_at_a_rate(url, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"question": "2+2?", "answer": "4"}\n')
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


@pytest.mark.exhaustive  # each alone is below and above
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


def test_an_engine_of_this_process_alone(tiny, tmp_path):
    argv = [*tiny, "--draft", "ngram", "--concurrency", "3", *LOAD, "--via", "offline"]  # whose programs are there
    document = command(tmp_path / "x.json", *argv, "--request-rate", "100")
    (row,) = document["rows"]
    assert row["load"] == "offline 3, 100/s" and (row["completed"], row["output_tokens"]) == (6, 72)
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


class Other(http.server.BaseHTTPRequestHandler):
    """An OpenAI server that isn't jaxspec's: no unknown fields, spaces in its JSON, other facts in /server_info."""

    protocol_version = "HTTP/1.1"

    def _answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        served = b'{"data": [{"id": "first"}, {"id": "other"}]}'
        self._answer(200, served if self.path == "/v1/models" else b'{"stats": null}')

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["model"] != "other" or ("ignore_eos" in asked and "messages" in asked):
            return self._answer(400, b"bad fields")
        events = [{"choices": [{"index": 0, "text": "a b"}]}, {"choices": [{"index": 0, "text": "c"}]}]
        events += [{"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 4}}]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self._answer(200, body.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def other():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_of_another_kind(other, tmp_path, capsys):
    argv = ["--concurrency", "2", *LOAD, "--goodput", "ttft:60000,e2e:60000", "--csv", str(tmp_path / "x.csv")]
    argv += ["--model", "other"]  # the second that it has
    document = command(tmp_path / "x.json", "--base-url", f"{other}/v1", "--vocab-size", "50", *argv)
    (row,) = document["rows"]
    assert (row["completed"], row["good"], row["prompt_tokens"], row["output_tokens"]) == (6, 6, 120, 24)
    assert row["goodput_per_s"] == row["requests_per_s"] == 6 / row["seconds"]
    assert "accept_length" not in row and "not jaxspec's" in document["notes"][-1]
    (line,) = csv.DictReader((tmp_path / "x.csv").open())
    assert float(line["ttft_p95_ms"]) == row["ttft_p95_ms"] <= row["ttft_max_ms"]
    (tmp_path / "q.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    asked = ["--dataset", "gsm8k", "--data", str(tmp_path / "q.jsonl"), "--num-prompts", "2"]
    asked += ["--model", "other", "--concurrency", "1"]
    assert command(tmp_path / "y.json", "--base-url", other, *asked)["rows"][0]["completed"] == 2
    for argv, said in (
        ([], "give --vocab-size"),
        (["--vocab-size", "50"], "every request failed; the first: status 400: bad fields"),  # of the first model
        (["--model", "third"], f"--model third isn't served at {other}; it has first, other"),
        (["--draft", "ngram"], "--draft is an engine's flag, and the server of --base-url has its own: leave one out"),
    ):
        with pytest.raises(SystemExit):
            bench.main(["serve", "--base-url", other, *argv])
        assert said in capsys.readouterr().err


def test_rates_peaks_and_goodput_of_known_replies():
    replies = [Reply(0.0, 10, 4, [0.5, 1.5], 2.0), Reply(1.0, 10, 1, [1.75], 4.0), Reply(0.0, error="x")]
    row = latency.figures(replies, {"ttft": 600.0, "tpot": 400.0})
    assert (row["requests_per_s"], row["total_tokens_per_s"], row["peak_output_tokens_per_s"]) == (0.5, 6.25, 3.0)
    assert (row["good"], row["ttft_max_ms"], row["ttft_p95_ms"]) == (1, 750.0, 737.5)
    assert latency.figures(replies, {"ttft": 600.0, "tpot": 300.0})["good"] == 0


@pytest.mark.parametrize("text", ["itl:5", "ttft", "ttft:0", "ttft:x"])
def test_limits_that_say_nothing_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        bench.main(["serve", "--goodput", text])
    assert "takes limits in ms" in capsys.readouterr().err
