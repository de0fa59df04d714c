"""The command line: generated flags, the config file, and what `python -m server` says to mistakes."""

import dataclasses
import json
import shutil
import socket
import subprocess
import threading

import httpx
import pytest

from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.flags import engine_options
from jaxspec.config.options import ConfigError, flag, options_of
from jaxspec.engine.async_llm import EngineDead
from jaxspec.models.model_config import ModelConfig
from jaxspec.text.tokenizer import Tokenizer
from server import __main__ as command
from server.app import create_app
from server.cli.options import UsageError, make_parser, parse
from tests.server.fake import FakeLLM
from tests.server.live import serving
from tests.support.sample import rare
from tests.support.tiny import BYTE_VOCAB, CHAT_TEMPLATE, tiny_checkpoint, tiny_config


def test_every_engine_option_has_a_flag_and_a_help_text():
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert list(options_of(EngineConfig)) == [field.name for field in dataclasses.fields(EngineConfig)]
    actions = {action.dest: action for action in make_parser()._actions}
    for name in fields:
        assert flag(name) in actions[name].option_strings and len(actions[name].help) > 10


def test_defaults_are_the_engines_but_for_the_drafter():
    assert EngineConfig(**engine_options(parse([]))) == EngineConfig(draft="auto")


def test_values_have_the_fields_types():
    args = parse(["--page-size", "8", "--mem-fraction-static", "0.5", "--disable-overlap", "--context-length=99"])
    assert (args.page_size, args.mem_fraction_static, args.disable_overlap, args.context_length) == (8, 0.5, True, 99)


@pytest.mark.parametrize("argv,says", [
    (["--page-sise", "8"], "did you mean --page-size"),
    (["--page", "8"], "unknown argument --page"),
    (["--page-size", "x"], "invalid int value: 'x'"),
    (["--port", "70000"], "0 to 65535, got 70000"),
    (["--port", "http"], "0 to 65535, got http"),
    (["a/b", "c/d"], "unknown argument c/d: a/b is the model to serve, and there can be but one"),
    (["a/b", "--model", "c/d"], "unknown argument --model c/d: a/b is the model"),
    (["--torchao-config", "int4wo"], "weights are quantised by --quantization fp8"),
    (["--max-loras-per-batch", "2"], "unknown argument --max-loras-per-batch; here it is --max-loras"),
    (["--enable-overlap-schedule"], "unknown argument --enable-overlap-schedule; --help lists"),
    (["--enable-prefix-caching"], "it is always on"),
    (["--no-skip-warmup"], "unknown argument --no-skip-warmup; --help"),
    (["--max-model-len", "8"], "unknown argument --max-model-len; here it is --context-length"),
    (["--generation-config", "vllm"], "unknown argument --generation-config; here it is --sampling-defaults"),
    (["-tp", "2"], r"unknown argument -tp; here it is --tp-size\n.*\n.*--tp-size 2"),
    (["--tool-call-parser", "x"], "invalid choice: 'x' .*'auto', 'none', 'hermes'"),
    (["--tp", "1", "--pp-size", "4"], "unknown argument --pp-size; of several GPUs, --tp-size"),
    (
        ["--page-sise", "8", "--x=1", "a/b", "--max-num-seqs", "4"],
        r"arguments\n  --page-sise; did you mean --page-size\?\n  --x; --help lists the flags\n  --max-num-seqs",
    ),
    (["--request-timeout", "0"], "a number of seconds above 0, got '0'"),
    (["--drain-seconds", "inf"], "a number of seconds above 0, got 'inf'"),
    (["--api-key", ""], "--api-key: is empty, which no client can send; leave it out"),
    (["--api-key= "], "--api-key: is empty"),
    (["--max-queued-requests", "-1"], "an integer of at least 0"),
    (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
])  # fmt: skip
def test_bad_command_lines(argv, says):
    with pytest.raises(UsageError, match=says):
        parse(argv)


@pytest.mark.parametrize("argv", [["a/b"], ["--page-size", "8", "a/b"], ["a/b", "--page-size", "8"], ["--model=a/b"]])
def test_a_model_may_stand_alone(argv):
    assert parse(argv).model == "a/b"


@pytest.mark.parametrize("argv", [["--tp", "1"], ["-tp", "1"], ["--tp-size=1", "--dp-size", "1", "--pp-size=1"]])
def test_one_gpu_is_what_there_is(argv):
    assert parse([*argv, "--page-size", "8"]).page_size == 8


def test_help_shows_every_default_and_fits_a_screen_before_it_goes_into_details():
    actions = [action for action in make_parser()._actions if action.dest not in ("help", "version", "config")]
    assert [action.dest for action in actions if "default: " not in action.help] == []
    common = make_parser().format_help().split("\nmodel:")[0]
    assert "--model" in common and "--draft" in common and "--port" in common and common.count("\n") < 45


def write(tmp_path, text):
    path = tmp_path / "server.yaml"
    path.write_text(text)
    return ["--config", str(path)]


def test_config_file(tmp_path):
    text = (
        "page_size: 8\ndraft: none\nmax-total-tokens: 0\ndisable_overlap: true\nskip-warmup: false\nseed: -1\nport: 0\n"
    )
    args = parse([*write(tmp_path, text), "--draft", "ngram"])
    assert (args.page_size, args.draft, args.disable_overlap, args.skip_warmup) == (8, "ngram", True, False)
    assert (args.seed, args.max_total_tokens, args.port) == (-1, 0, 0)
    assert parse(["--draft", "ngram", *write(tmp_path, text)]).draft == "ngram", "wherever --config stands"
    assert parse(write(tmp_path, "")).decode_log_interval == 40


def test_values_of_a_config_file_are_the_texts_that_stand_there(tmp_path):
    """YAML would read a number, a version without its last 0, and true."""
    text = (
        "api_key: 0123456\nserved_model_name: 1.10\nfp8_activations: on\ndisable_overlap: yes\nseed:\n"
        'allowed_origins: ["https://a.example", https://b.example]\ndecode_log_interval: null\n'
        "batch_sizes: [1, 2]\n"
    )
    args = parse(write(tmp_path, text))
    assert (args.api_key, args.served_model_name, args.fp8_activations) == ("0123456", ["1.10"], "on")
    assert args.disable_overlap and args.allowed_origins == ["https://a.example", "https://b.example"]
    assert args.batch_sizes == "1,2" and args.decode_log_interval == 40 and args.seed == parse([]).seed


@pytest.mark.parametrize("text,says", [
    ("page_sise: 8", "unknown key page_sise; did you mean --page-size"),
    ("max_num_seqs: 8", "unknown key max_num_seqs; here it is --max-running-requests"),
    ("config: x", "unknown key config"),
    ("page_size: [1]", "takes one value"),
    ("page_size: true", "invalid int value: 'true'"),
    ("draft: {a: 1}", "takes one value, got a mapping"),
    ("disable_overlap: 3", "true or false, got 3"),
    ("page_size: 1.5", "invalid int value"),
    ("- a", "one flag a line"),
    ("a: [", "server.yaml"),
    ("api_key: ''", "--api-key: is empty"),
])  # fmt: skip
def test_bad_config_files(tmp_path, text, says):
    with pytest.raises(UsageError, match=says):
        parse(write(tmp_path, text))


@pytest.fixture
def no_engine(monkeypatch):
    def refuse(**_):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(command, "AsyncLLM", refuse)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(command.logs, "set_up", lambda *_: None)


def test_an_engine_that_dies_as_it_starts_ends_with_status_1_and_one_line(no_engine, monkeypatch, capsys):
    def die(**_):
        raise EngineDead("engine 0 of --dp-size didn't start: SIGKILL ended its process")

    monkeypatch.setattr(command, "DataParallelLLM", die)
    assert command.main(["--port", "0", "--dp-size", "2"]) == 1
    assert (
        capsys.readouterr().err == "python -m server: engine 0 of --dp-size didn't start: SIGKILL ended its process\n"
    )


def test_port_in_use_is_found_before_the_model_loads(no_engine, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command.main(["--port", str(port)]) == 2
    told = capsys.readouterr().err
    assert f"port {port}" in told and "--port" in told and told.count("\n") == 1


@pytest.mark.parametrize("argv", [["--nonsense"], ["--host", "256.1.1.1", "--port", "0"]])
def test_bad_flags_exit_2_with_one_line(no_engine, capsys, argv):
    assert command.main(argv) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_address_of_another_machine_is_no_port_in_use(no_engine, capsys):
    assert command.main(["--host", "192.0.2.1", "--port", "0"]) == 2
    told = capsys.readouterr().err
    assert "--host is an address of this machine" in told and "choose another" not in told


def test_engine_errors_exit_2(no_engine, monkeypatch, capsys):
    def refuse(**_):
        raise ConfigError("--page-size must be an integer of at least 1, got 0")

    monkeypatch.setattr(command, "AsyncLLM", refuse)
    assert command.main(["--port", "0"]) == 2
    assert capsys.readouterr().err == "python -m server: --page-size must be an integer of at least 1, got 0\n"


def test_interrupt_while_loading_is_quiet(no_engine, monkeypatch, capsys):
    def interrupt(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "AsyncLLM", interrupt)
    assert command.main(["--port", "0"]) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("loaded", "status", "level"), [(False, 0, "INFO"), (True, 1, "CRITICAL")])
def test_what_does_not_end_is_left(monkeypatch, caplog, loaded, status, level):
    """Compiling can't be interrupted, and nobody needs to hear of it as of a failure."""
    event, left = threading.Event(), []
    if loaded:
        event.set()
    monkeypatch.setattr(command, "_loaded", event)
    monkeypatch.setattr(command.logging, "shutdown", lambda: None)
    monkeypatch.setattr(command.os, "_exit", left.append)
    with caplog.at_level("INFO", "jaxspec.server"):
        command._leave()
    assert left == [status] and [each.levelname for each in caplog.records] == [level]


@pytest.mark.parametrize("source", ["none", "flag", "environment"])
def test_the_command_to_try_passes_the_key_without_telling_it(monkeypatch, source):
    """Run the greeting's command in a shell, with a `curl` that prints its arguments."""
    greetings = []
    monkeypatch.delenv("JAXSPEC_API_KEY", raising=False)
    if source == "environment":
        monkeypatch.setenv("JAXSPEC_API_KEY", "sesame")
    monkeypatch.setattr(command, "create_app", lambda llm, name, key, sampling, **_: greetings.append(key))
    monkeypatch.setattr(command._Server, "run", lambda self, sockets: greetings.append(self._greeting))
    args = parse(["--api-key", "sesame"] if source == "flag" else [])
    with command._bind("127.0.0.1", 0) as listener:
        command._serve(FakeLLM(), args, listener)
    key, greeting = greetings
    assert key == (None if source == "none" else "sesame") and "sesame" not in greeting
    shown = "curl() { printf '%s\\n' \"$@\"; }\n" + greeting.split("\n", 1)[1]
    told = subprocess.run(["sh", "-c", shown], env={"JAXSPEC_API_KEY": "sesame"}, capture_output=True, text=True).stdout
    assert ("Authorization: Bearer sesame" in told.splitlines()) == (source != "none")
    assert '"temperature": 0, "max_tokens": 64' in told.splitlines()[-1]


def without_tokenizer(folder):
    return None


def with_broken_template(folder):
    (folder / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    return Tokenizer.from_folder(folder)


def with_named_templates(folder):
    file = folder / "tokenizer_config.json"
    named = [{"name": "rag", "template": CHAT_TEMPLATE}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": named}))
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("read,vocab,why,route,prompt", [
    (Tokenizer.from_folder, BYTE_VOCAB, None, "chat/completions", None),
    (without_tokenizer, 64, "the model has no tokenizer; add tokenizer.json", "completions", [1, 2, 3]),
    (
        with_broken_template,
        BYTE_VOCAB,
        "the chat template has a mistake in line 2: unexpected '}'",
        "completions",
        "The capital of France is",
    ),
    (
        with_named_templates,
        BYTE_VOCAB,
        "has chat templates named rag, and no default",
        "completions",
        "The capital of France is",
    ),
    (Tokenizer.from_folder, 257, "they have token id 258, and the model's are 0 to 256", "completions", "The"),
    rare(Tokenizer.from_folder, 64, "they have token id 258, and the model's are 0 to 63", "completions", [1, 2, 3]),
])  # fmt: skip
def test_a_model_that_cannot_chat_is_told_at_start(monkeypatch, caplog, tmp_path, read, vocab, why, route, prompt):
    """And what the ready line says to try works."""
    greetings = []
    monkeypatch.setattr(command, "create_app", lambda *_, **options: None)
    monkeypatch.setattr(command._Server, "run", lambda self, sockets: greetings.append(self._greeting))
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint(vocab=BYTE_VOCAB, tokenizer=True), folder)
    llm = FakeLLM(tokenizer=read(folder), model_config=ModelConfig.from_hf(tiny_config(vocab=vocab)))
    with command._bind("127.0.0.1", 0) as listener:
        command._serve(llm, parse([]), listener)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == (why is not None)
    if why is not None:
        assert warned[0].startswith("chats will fail: ") and why in warned[0] and "\n" not in warned[0]
    assert f"/v1/{route} -H" in greetings[0]
    body = json.loads(greetings[0].split(" -d '")[1].removesuffix("'"))
    if prompt is None:
        assert body["messages"]
    else:
        assert body["prompt"] == prompt or body["prompt"].startswith(prompt)


def test_a_key_that_is_set_and_empty_is_told(monkeypatch, caplog):
    """deploy/ sets it so where no key is wanted; whoever meant to give one sees that it is lost."""
    monkeypatch.setattr(command._Server, "run", lambda self, sockets: None)
    for key, told in (("", 1), ("sesame", 0)):
        caplog.clear()
        monkeypatch.setenv("JAXSPEC_API_KEY", key)
        with command._bind("127.0.0.1", 0) as listener:
            command._serve(FakeLLM(), parse([]), listener)
        assert caplog.text.count("JAXSPEC_API_KEY is set and empty: no key is required") == told


@pytest.mark.parametrize("asked", ["model", "openai"])
def test_whose_sampling_defaults_a_server_has(monkeypatch, asked):
    """The checkpoint's, or nobody's."""
    given = []
    monkeypatch.setattr(command, "create_app", lambda llm, name, key, sampling, **_: given.append(sampling))
    monkeypatch.setattr(command._Server, "run", lambda self, sockets: None)
    llm = FakeLLM(sampling={"temperature": 0.6, "top_k": 20})
    with command._bind("127.0.0.1", 0) as listener:
        command._serve(llm, parse(["--sampling-defaults", asked]), listener)
    (defaults,) = given
    assert defaults == ({"temperature": 0.6, "top_k": 20} if asked == "model" else {})


def test_what_a_request_says_of_sampling_comes_before_the_defaults():
    llm, ask = FakeLLM(), {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    with serving(create_app(llm, sampling={"temperature": 0.6, "top_k": 20})) as url:
        for route, field in (("completions", "prompt"), ("chat/completions", "messages")):
            for said in ({}, {"temperature": 0.2, "top_k": None}, {"temperature": 0, "top_k": 3}):
                assert httpx.post(f"{url}/v1/{route}", json={field: ask[field], **said}).status_code == 200
    found = [(params.temperature, params.top_k) for _, params in llm.started]
    assert found == [(0.6, 20), (0.2, 20), (0.0, 3)] * 2
