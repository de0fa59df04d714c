"""One model on several hosts: what nodes say to each other, and that a node which repeats another's programs has the
same state. Two servers as two hosts are in `test_two_processes_serve_as_one`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest

from jaxspec import LLM, ConfigError, EngineConfig, SamplingParams, StructuredOutput
from jaxspec.compiling.programs import Programs
from jaxspec.engine.engine import Engine
from jaxspec.engine.runner import Runner
from jaxspec.parallel import hosts as module
from jaxspec.parallel.channel import HEAD, Channel
from jaxspec.parallel.hosts import Follower, HostLost, Leader, decode, encode, facts
from jaxspec.replicas.follower import replay
from server.cli.options import UsageError, parse
from tests.server.live import meanwhile, up, wait_for
from tests.support import heads
from tests.support.tiny import BYTE_VOCAB, tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = dict(context_length=96, page_size=8, max_running_requests=4, max_total_tokens=112, num_draft_tokens=3)
OPTIONS |= dict(skip_warmup=True, few_programs=True, dtype="float32")
SOURCE = "0123456789abcdef"  # a digest


def nodes(ours: dict[str, str], theirs: dict[str, str]) -> tuple[Leader, Follower, threading.Thread]:
    """Node 0 and node 1 over a socket, and the thread in which node 1 waits to be welcome."""
    a, b = socket.socketpair()
    for end in (a, b):
        end.settimeout(module.SILENT_SECONDS)
    leader, follower = Leader(), Follower(1, Channel(b))
    leader.when_lost = lambda error: lost.append(error)
    lost.clear()
    leader.add(1, Channel(a))
    waiting = threading.Thread(target=lambda: said.append(outcome(follower.welcomed)))
    said.clear()
    waiting.start()
    return leader, follower, waiting


lost: list[HostLost] = []
said: list = []


def outcome(call, *given):
    try:
        return call(*given)
    except Exception as error:
        return error


@pytest.fixture(autouse=True)
def ends(monkeypatch):
    """Note calls that would end the process, in place of an end. No thread of a test outlives this."""
    noted, nodes, node = [], [], module.Node

    def kept(*given):
        nodes.append(node(*given))
        return nodes[-1]

    monkeypatch.setattr(module, "Node", kept)
    monkeypatch.setattr(module, "end_process", lambda *_: noted.append(True))
    monkeypatch.setattr(module, "END_SECONDS", 0.0)
    yield noted
    for each in nodes:
        each.close()
    for thread in threading.enumerate():
        if thread.name.startswith("jaxspec-node"):
            thread.join(10)
            assert not thread.is_alive()


MALFORMED = (
    b"",
    b"[1]",
    b"\xff\xfe",
    b'["a", null, [["int32", [2]]]]\nabc',
    b'["a", null, [["object", [1]]]]\n' + bytes(8),
    b'["a", null, [["int32", [9223372036854775807, 4]]]]',
    b'["a", null, [["int32", [18446744073709551616]]]]',
    b'["a", null, [["int32", [-5]]]]',
    b'["a", null, [[[], []]]]',
    b'["a", null, 5]',
    b"[" * 60_000,
    b'["hello", {"a":' + b'{"a":' * 9_000,
)


def test_a_message_is_what_was_sent():
    arrays = np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 4), np.uint32), np.array([b"\n"[0]], np.uint8)
    kind, value, got = decode(encode("run", {"a": [1]}, arrays))
    assert (kind, value) == ("run", {"a": [1]})
    for x, y in zip(arrays, got, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and (x == y).all()
    for wrong in MALFORMED:
        with pytest.raises(ValueError):
            decode(wrong)


def test_nodes_that_were_started_otherwise_are_refused_by_name(ends):
    ours = facts(EngineConfig(tp_size=4), 2, SOURCE)
    assert facts(EngineConfig(tp_size=4, model="elsewhere/on/this/host"), 2, SOURCE) == ours
    assert facts(EngineConfig(tp_size=4), 2, SOURCE[::-1]) != ours
    leader, _, waiting = nodes(ours, ours)
    leader.welcome(ours, {1: ours})
    waiting.join()
    assert said == [None]
    theirs = facts(EngineConfig(tp_size=4, page_size=32), 2, SOURCE)
    leader, _, waiting = nodes(ours, theirs)
    words = "node 1 was started with --page-size 32, and node 0 None; start all nodes alike"
    with pytest.raises(ConfigError, match=words):
        leader.welcome(ours, {1: theirs})
    waiting.join()
    assert isinstance(said[0], ConfigError) and str(said[0]) == words
    assert not ends


def test_nodes_take_the_least_room_and_refuse_other_shapes():
    leader, follower, waiting = nodes({}, {})
    leader.welcome({}, {1: {}})
    waiting.join()
    with meanwhile(lambda tokens: follower.agree(tokens, 3), 70) as answers:
        assert leader.agree(64, 5) == [64, 3]
    assert answers == [[64, 3]]
    words = "node 1 has weights b, and node 0 a; its checkpoint or"
    with meanwhile(follower.meet, {"weights": "b"}) as answers, pytest.raises(ConfigError, match=words):
        leader.meet({"weights": "a"})
    assert isinstance(answers[0], ConfigError)


def test_orders_come_in_order_until_the_end(ends):
    leader, follower, waiting = nodes({}, {})
    leader.welcome({}, {1: {}})
    waiting.join()
    for i in range(3):
        leader.broadcast("round_greedy", np.full((1, 4), i, np.int32))
    assert [follower.order()[1][0].tolist() for _ in range(3)] == [[[i] * 4] for i in range(3)]
    leader.close(0.1)
    assert follower.order() is None
    assert not lost


def test_a_lost_node_is_noticed_on_both_sides(ends, monkeypatch, caplog):
    leader, follower, waiting = nodes({}, {})
    leader.welcome({}, {1: {}})
    waiting.join()
    follower._leader.close()
    wait_for(lambda: lost and ends, 5)
    assert "node 1 is gone" in str(lost[0])
    with pytest.raises(HostLost):
        leader.broadcast("round_greedy")
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(module, "BEAT_SECONDS", 60.0)
    *_, waiting = nodes({}, {})
    wait_for(lambda: lost, 5)
    waiting.join()
    assert "hasn't been heard for 0.3 seconds" in caplog.text


FACTS = {"--page-size": "8"}


def gather(nodes: int = 2, token: str | None = "secret", facts: dict[str, str] = FACTS) -> tuple[int, list]:
    """Node 0 while others come: its port, and what it has to say once they have."""
    port, answers = free_ports(), []
    given = "127.0.0.1", port, nodes, facts, token
    threading.Thread(target=lambda: answers.append(outcome(module._gather, *given)), daemon=True).start()
    return port, answers


def call(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 20)
        except ConnectionRefusedError:
            time.sleep(0.01)


def part(leader: Leader, ends: list, followers: int) -> None:
    """End nodes, all before the test that they are of."""
    leader.close(0.1)
    wait_for(lambda: len(ends) == followers)


def test_nodes_meet_whoever_else_connects(monkeypatch, caplog, ends):
    """Malformed, huge, false and silent ones delay nobody and end nothing."""
    monkeypatch.setattr(module, "MAX_GREETED", 200)
    port, answers = gather(nodes=3)
    hello = {"rank": 1, "facts": FACTS, "nonce": "n", "proof": "p"}
    messages = [encode("hello", hello | wrong) for wrong in (
        {}, {"rank": 0}, {"rank": 3}, {"rank": "1"}, {"rank": True}, {"rank": None}, {"facts": None}, {"facts": []},
        {"facts": {"a": {}}}, {"proof": 5}, {"proof": "\u00e9"}, {"nonce": None},
    )]  # fmt: skip
    messages += [encode("hello", {name: hello[name] for name in hello if name != left}) for left in hello]
    messages += [encode("hello"), encode("sizes", [1]), *MALFORMED]
    packets = [HEAD.pack(len(body), 0, zlib.crc32(body)) + body for body in messages]
    packets += [HEAD.pack(size, 0, 0) for size in (2**46, 2**63, 2**64 - 1, module.MAX_HELLO + 1)]
    packets += [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", bytes(1000), b"\xff" * 1000, b""]
    with contextlib.ExitStack() as opened:
        callers = [opened.enter_context(call(port)) for _ in packets]
        for caller, packet in zip(callers, packets, strict=True):
            caller.sendall(packet)
        silent = [opened.enter_context(call(port)) for _ in range(20)]
        began = time.monotonic()
        with meanwhile(lambda rank: module._come("127.0.0.1", port, rank, FACTS, "secret"), 2, 1) as followers:
            pass
        assert time.monotonic() - began < module.HELLO_SECONDS * 0.8
        assert [each.rank for each in followers] == [2, 1] and silent
        wait_for(lambda: answers)
        assert [node.rank for node in answers[0]._nodes] == [1, 2]
        said = "\n".join(record.getMessage() for record in caplog.records)
        assert "70368744177664 bytes was announced" in said and "no such node is due" in said and "secret" not in said
    part(answers[0], ends, 2)


def test_a_token_that_differs_is_refused_on_both_sides(monkeypatch, caplog):
    monkeypatch.setattr(module, "START_SECONDS", 3.0)
    port, answers = gather()
    for token in ("another", None):
        with pytest.raises(ConfigError, match="--dist-token of node 1 isn't node 0's"):
            module._come("127.0.0.1", port, 1, FACTS, token)
    assert "its --dist-token differs" in caplog.text and not answers
    wait_for(lambda: answers, 20)
    assert isinstance(answers[0], ConfigError) and "node 1 didn't come" in str(answers[0])


def test_neither_side_takes_another_that_repeats_what_it_heard(ends):
    """A node's proof is of both sides' nonces, and node 0 has one to give, too."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        meanwhile(
            lambda port: outcome(module._come, "127.0.0.1", port, 1, FACTS, "secret"), listener.getsockname()[1]
        ) as answers,
    ):
        end = Channel(listener.accept()[0])
        end.send(encode("challenge", "n"))
        sent = end.receive()
        assert b"secret" not in sent
        end.send(encode("accepted", decode(sent)[1]["proof"]))
    assert isinstance(answers[0], ConfigError) and "doesn't know this node's --dist-token" in str(answers[0])
    port, others = gather()
    with call(port) as caller:
        channel = Channel(caller)
        channel.receive()
        channel.send(sent)
        assert decode(channel.receive())[0] == "refused" and not others
    module._come("127.0.0.1", port, 1, FACTS, "secret")
    wait_for(lambda: others)
    part(others[0], ends, 1)


@dataclasses.dataclass
class Tape:
    """Hosts of one process: records what is dispatched, or plays it back."""

    follows: bool
    orders: list = dataclasses.field(default_factory=list)

    def agree(self, *sizes: int) -> list[int]:
        return list(sizes)

    def meet(self, shapes: dict[str, str]):
        self.shapes = shapes
        return None if self.follows else self.broadcast

    def broadcast(self, kind: str, *arrays: np.ndarray) -> None:
        self.orders.append(decode(encode("run", kind, arrays))[1:])

    def order(self):
        return self.orders.pop(0) if self.orders else None


def test_a_node_that_repeats_the_programs_has_the_same_state(monkeypatch):
    """And is told of each program before the leader compiles it, so that both compile at once."""
    untold, compile_one = [], Programs._compile

    def watched(self: Programs, kind: str, *of):
        untold.extend({kind} - {told for told, _ in tape.orders})
        return compile_one(self, kind, *of)

    monkeypatch.setattr(Programs, "_compile", watched)
    folder = tiny_checkpoint(vocab=BYTE_VOCAB, tokenizer=True, num_hidden_layers=1)
    options = EngineConfig(model=str(folder), draft="ngram", **OPTIONS)
    tape = Tape(follows=False)
    llm = LLM.__new__(LLM)
    llm.engine, llm._turn = Engine(options, hosts=tape), threading.Lock()
    prompts = [[1, 2, 3, 4, 5, 1, 2, 3], [7], list(range(40)), [5, 6] * 12, [9]]
    settings = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * 4  # the last one samples
    settings.append(SamplingParams(temperature=0.8, seed=1, max_tokens=6, logprobs=1, prompt_logprobs=1))
    said = llm.generate(prompts, settings)
    grammar = StructuredOutput(regex="(yes|no), [0-9]{2}")
    llm.generate([[3, 4]], SamplingParams(temperature=0, max_tokens=9, structured=grammar))
    kinds = {kind.partition("_")[0] for kind, _ in tape.orders}
    assert kinds >= {"admit", "prefill", "score", "first", "round", "draft", "forward", "conclude", "masked"}
    assert untold == []

    follower = Runner(options, hosts=Tape(follows=True))
    assert follower.programs.broadcast is None and follower.hosts.shapes == tape.shapes
    follower.hosts.orders = list(tape.orders)
    replay(follower, follower.hosts)
    for ours, theirs in zip(jax.tree.leaves(llm.engine.runner.state), jax.tree.leaves(follower.state), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    tape.orders.clear()
    llm.engine.runner.reset()
    assert [kind for kind, _ in tape.orders] == ["reset"]
    assert [out.token_ids for out in llm.generate(prompts[:1], settings[:1])] == [said[0].token_ids]


@pytest.mark.parametrize(("flags", "words"), [
    ("--nnodes 2", "--nnodes 2 needs --dist-init-addr HOST:PORT"),
    ("--nnodes 2 --dist-init-addr here", "where node 0 is, got here"),
    ("--nnodes 2 --dist-init-addr :5", "where node 0 is, got :5"),
    ("--node-rank 1", "--node-rank 1: of --nnodes 1 it is from 0 to 0"),
    ("--nnodes 2 --tp-size 3 --dist-init-addr a:1", "--tp-size 3 is the number of GPUs on all hosts; --nnodes 2 must"),
    ("--nnodes 2 --tp-size 4 --dp-size 2 --dist-init-addr a:1", "--dp-size 2 runs on one host"),
    ("--nnodes 2 --dist-init-addr a:1 --master-port 5", "--master-port; with --nnodes, --dist-init-addr HOST:PORT"),
])  # fmt: skip
def test_flags_that_do_not_fit_together_are_named(flags, words):
    with pytest.raises(UsageError) as error:
        parse(flags.split())
    assert words in str(error.value)
    assert (
        parse(
            ["--nnodes", "2", "--tp", "1", "--tp-size", "4", "--dist-init-addr", "[::1]:9", "--node-rank", "1"]
        ).node_rank
        == 1
    )


def free_ports() -> int:
    """A port that is free, as is the next."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = one.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            return port


def start(folder: Path, draft: str, *flags: str) -> subprocess.Popen:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "PJRT_NPROC": "16"}
    env |= {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax-tests")}
    options = ["--skip-warmup", "--few-programs", "--max-running-requests", "4", "--max-total-tokens", "1024"]
    options += ["--context-length", "256", "--page-size", "8", "--num-draft-tokens", "3"]
    return subprocess.Popen(
        [sys.executable, "-m", "server", str(folder), "--draft", draft, *options, *flags], cwd=ROOT, env=env
    )


def ask(url: str, **body) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": "hello", "max_tokens": 24, **body}, timeout=120)


ASKED = (
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "structured_outputs": {"regex": "(yes|no), [0-9]{3}"}},
)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["follower killed", "leader killed", "stopped"])
def test_two_processes_serve_as_one(how, tmp_path):
    """Two virtual devices in each. Texts are those of one device. Killing either ends both within seconds, and what
    still ran is answered with an error."""
    folder = tiny_checkpoint("llama", BYTE_VOCAB, 2, tokenizer=True, num_attention_heads=8)
    draft = f"eagle3:{heads.random_eagle3(folder, tuple(range(3, BYTE_VOCAB, 2)), (0, 1))}"
    port, web = free_ports(), free_ports()
    url, several = (
        f"http://127.0.0.1:{web}",
        ("--tp-size", "4", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{port}"),
    )
    processes = [start(folder, draft, *several, "--node-rank", str(i), "--port", str(web)) for i in (1, 0)]
    follower, leader = processes
    try:
        wait_for(lambda: up(f"{url}/health"), 120)
        if how == "stopped":
            alone = start(folder, draft, "--port", str(port + 1000))
            processes.append(alone)
            wait_for(lambda: up(f"http://127.0.0.1:{port + 1000}/health"), 120)
            for body in ASKED:
                texts = [
                    ask(each, **body).json()["choices"][0]["text"] for each in (url, f"http://127.0.0.1:{port + 1000}")
                ]
                assert texts[0] == texts[1], body
            follower.send_signal(signal.SIGTERM)  # as an orchestrator does, to all at once
            time.sleep(0.5)
            assert ask(url, temperature=0).status_code == 200
            leader.terminate()
            assert (leader.wait(30), follower.wait(30)) == (0, 0)
            return
        replies = []

        def one() -> None:
            try:
                replies.append(ask(url, temperature=0, max_tokens=240, ignore_eos=True).status_code)
            except httpx.TransportError:
                replies.append("cut off")

        ask(url, temperature=0)  # so that programs are compiled
        thread = threading.Thread(target=one)
        thread.start()
        wait_for(lambda: httpx.get(f"{url}/load").json()["server_load"] == 1)
        (follower if how == "follower killed" else leader).kill()
        killed = time.monotonic()
        other = leader if how == "follower killed" else follower
        assert other.wait(15) not in (0, None)
        assert time.monotonic() - killed < 15
        thread.join()
        assert replies == [503 if how == "follower killed" else "cut off"]
    finally:
        for process in processes:
            process.kill()
            process.wait()
