"""Load test: 64 clients stream over HTTP, many of them hanging up, over too few slots and pages; then all must balance.

Every request is deterministic (greedy, or with a seed) and one of a fixed number of cases, so whatever completed can be
run again afterwards, alone, by an engine without drafts, prefix cache or neighbours, and must have said the same.
`make soak` runs ten minutes ($SOAK_SECONDS) with a draft model, and ten with the demo model on texts that repeat
themselves, whose n-grams are accepted; a short run with ngram is part of `make test`.
"""

import asyncio
import dataclasses
import json
import os
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from jaxspec import LLM, AsyncLLM, SamplingParams
from jaxspec.checkpoint import GgufFile, demo
from jaxspec.rounds.programs import MODES
from jaxspec.scheduling.audit import audit
from server.app import create_app
from tests.engine.test_lossless import checkpoint, draft_folder
from tests.server.live import serving, wait_for
from tests.support.engines import SMALL

CLIENTS = 64
DEADLINE = 500  # seconds after which a request counts as stuck; it waits for a handful at most
MEGABYTES_GROWTH = 96  # allowed between a quarter of the run and its end
MEGABYTES_FLAT = 24  # allowed over the second half of a long run
OPTIONS = SMALL | {"skip_warmup": False, "disable_structured_output": True, "decode_log_interval": 0}
OPTIONS |= {"draft_policy": "fixed", "prefill_sizes": None}  # as served
CROWDED = {"max_running_requests": 8, "max_total_tokens": 320}  # 8 x 192 would never run short
DEMO = {"max_running_requests": 6, "max_total_tokens": 184}  # a request has 7 pages of the 23 at first, and 16 at last

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))  # of a long run

GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.9, "seed": 11}
SETTINGS: list[dict[str, Any]] = [
    GREEDY,
    GREEDY,
    GREEDY | {"speculative": False},
    GREEDY | {"n": 2},
    GREEDY | {"logprobs": 3},
    GREEDY | {"stop": ["e", "QQ", "~"]},
    GREEDY | {"stop_token_ids": [5, 77, 130], "min_tokens": 3},
    GREEDY | {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    GREEDY | {"logit_bias": {"65": 3.0, "66": -100.0}},
    GREEDY | {"prompt_logprobs": 1},
    SEEDED,
    SEEDED | {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "n": 2},
    SEEDED | {"frequency_penalty": 0.5, "logprobs": 0},
    GREEDY | {"logit_bias": {"65": 100.0}},  # says the same again and again, so that drafts are accepted
]


@dataclass(frozen=True)
class Case:
    """A request to /v1/completions. `repeatable`: it gives the same text whatever else runs and whatever drafts."""

    prompt: list[int]
    settings: dict[str, Any]
    repeatable: bool

    @property
    def plain(self) -> bool:
        """Greedy, and nothing but the argmax is needed."""
        return self.settings.keys() <= {"temperature", "max_tokens", "n", "stop", "speculative", "ignore_eos"}

    def body(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "stream": True, "stream_options": {"include_usage": True}} | self.settings

    def params(self) -> SamplingParams:
        bias = {int(token): value for token, value in self.settings.get("logit_bias", {}).items()}
        return SamplingParams(**self.settings | {"logit_bias": bias})


@dataclass
class Answer:
    """Answer of a stream: text and finish reason of each choice, and the tokens billed."""

    texts: list[str]
    reasons: list[str | None]
    tokens: int = 0
    logprobs: int = 0


@dataclass
class Tally:
    """Answers that the clients got, and their counts."""

    answers: dict[int, Answer] = field(default_factory=dict)  # of each case that has completed at least once
    counts: Counter = field(default_factory=Counter)


def cases(count: int, draft: str) -> list[Case]:
    rng = np.random.default_rng(0)
    shared = [rng.integers(0, 256, 64).tolist() for _ in range(4)]
    made = []
    for number in range(count):
        settings = SETTINGS[number % len(SETTINGS)]
        prefix = shared[rng.integers(4)][: rng.choice([0, 8, 33, 64])]
        prompt = [*prefix, *rng.integers(0, 256, rng.integers(1, 30)).tolist()]
        # A draft model is sampled from too, and what is drafted moves with where rounds begin: preemption changes it.
        repeatable = settings["temperature"] == 0 or draft == "ngram"
        made.append(Case(prompt, settings | {"max_tokens": int(rng.choice([1, 3, 12, 40, 96]))}, repeatable))
        if "min_tokens" in settings:
            made[-1].settings["max_tokens"] = 30
    return made


def repeating(count: int) -> list[Case]:
    """For the demo model: lists that go on as they began, and are long beside the pool."""
    rng, tokenizer = np.random.default_rng(0), GgufFile(demo.fetch()).tokenizer()
    words = ["red", "green", "blue", "one", "two", "three", "north", "south", "apple", "pear", "left", "right"]
    made = []
    for number in range(count):
        line = ", ".join(rng.permutation(words)[: rng.integers(2, 6)]) + ", "
        settings = [GREEDY, GREEDY | {"n": 2}, SEEDED | {"temperature": 0.3}, GREEDY | {"speculative": False}]
        prompt = tokenizer.encode(line * int(rng.integers(3, 7)))[:40]
        made.append(
            Case(prompt, settings[number % 4] | {"max_tokens": int(rng.choice([16, 64, 88])), "ignore_eos": True}, True)
        )
    return made


async def client(number: int, http: httpx.AsyncClient, work: list[Case], tally: Tally, until: float) -> None:
    """Send one request after the other; one in three hangs up, after some events or some time.

    Every other two seconds all clients send plain greedy requests only: whole batches of them run another program.
    """
    rng = np.random.default_rng([1, number])
    plain = [index for index, case in enumerate(work) if case.plain]
    while time.monotonic() < until:
        index = int(rng.choice(plain if time.monotonic() % 4 < 2 else len(work)))
        mood = rng.random()
        most = int(rng.integers(1, 12)) if mood < 0.2 else None
        patience = float(rng.uniform(0, 0.5)) if mood > 0.87 else None
        try:
            async with asyncio.timeout(patience):
                answer = await request(http, work[index], most)
        except TimeoutError:
            tally.counts["impatient"] += 1
            continue
        if answer is None:
            tally.counts["hung up"] += 1
            continue
        tally.counts["completed"] += 1
        tally.counts["tokens"] += answer.tokens
        seen = tally.answers.setdefault(index, answer)
        if work[index].repeatable:
            assert answer == seen, f"case {index} {work[index].settings}: another answer than before"


async def request(http: httpx.AsyncClient, case: Case, most: int | None) -> Answer | None:
    """Stream a request; None if it was left after `most` events. Fails if it is stuck, refused or broken."""
    n = case.settings.get("n", 1)
    answer, events, ended = Answer([""] * n, [None] * n), 0, False
    deadline = time.monotonic() + DEADLINE
    async with http.stream("POST", "/v1/completions", json=case.body()) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        async for line in response.aiter_lines():
            assert time.monotonic() < deadline, f"stuck: {case}"
            if not line:
                continue
            if ended := line == "data: [DONE]":
                continue
            take(answer, json.loads(line.removeprefix("data: ")))
            events += 1
            if events == most:
                return None
    assert ended and all(answer.reasons), f"the stream broke off: {case}, {answer}"
    assert answer.logprobs == (answer.tokens if "logprobs" in case.settings else 0)
    return answer


def take(answer: Answer, event: dict[str, Any]) -> None:
    assert "error" not in event, event
    for choice in event["choices"]:
        assert answer.reasons[choice["index"]] is None, f"more after the end: {event}"
        answer.texts[choice["index"]] += choice["text"]
        answer.reasons[choice["index"]] = choice["finish_reason"]
        if choice.get("logprobs"):
            answer.logprobs += len(choice["logprobs"]["tokens"])
    if event.get("usage"):
        answer.tokens = event["usage"]["completion_tokens"]


async def load(url: str, llm: AsyncLLM, work: list[Case], seconds: float, clients: int) -> tuple[Tally, list[float]]:
    """All clients at once, for `seconds`. Also the process's memory in MiB, every tenth of that time."""
    tally, memory, end = Tally(), [], time.monotonic() + seconds
    unlimited = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=DEADLINE, limits=unlimited) as http,
        asyncio.TaskGroup() as group,
    ):
        for number in range(clients):
            group.create_task(client(number, http, work, tally, end))
        for _ in range(10):
            await asyncio.sleep(seconds / 10)
            # In the engine's thread: what it raises ends the engine and so all.
            llm._call(lambda: audit(llm.engine.scheduler))
            memory.append(resident())
    return tally, memory


def resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def soak(draft: str, work: list[Case], seconds: float, model: str | None = None, clients: int = CLIENTS) -> str:
    """Load, then the checks; returns the summary."""
    crowded = DEMO if model == demo.NAME else CROWDED
    model = model or str(checkpoint("llama"))
    name = draft if draft == "ngram" else f"standalone:{draft_folder('llama', 'noisy')}"
    options = OPTIONS | crowded | {"model": model, "draft": name, "num_draft_tokens": 3}
    llm = AsyncLLM(**options)
    try:
        with serving(create_app(llm)) as url:
            tally, memory = asyncio.run(load(url, llm, work, seconds, clients))
            wait_for(lambda: not llm.engine.busy)
        counts, stats = tally.counts, llm.stats()
        check_balance(llm)
    finally:
        llm.close()
    assert stats["compiles_since_start"] == 0, "something was compiled under load"
    left, aborted = counts["hung up"] + counts["impatient"], stats["requests_total"].get("abort", 0)
    assert aborted > left / 3, (
        f"{left} clients left, and {aborted} completions were aborted"
    )  # others were over by then
    assert min(counts[mood] for mood in ("completed", "hung up", "impatient")) > 0
    modes = MODES if any("logprobs" in case.settings for case in work) else MODES[:2]
    assert all(stats["dispatches"][f"{kind}_{mode}"] for kind in ("first", "round") for mode in modes)
    assert stats["preemptions_total"] and stats["cached_tokens_total"], "pages never ran short, or were never shared"
    assert stats["accepted_per_position"][-1], "no round had all of its drafts accepted"
    plain = LLM(**options | {"disable_prefix_cache": True, "skip_warmup": True})
    plain.engine.runner.programs = llm.engine.runner.programs  # the same, compiled
    compared = check_answers(tally, work, plain)
    growth, late = memory[-1] - memory[2], memory[-1] - memory[4]
    assert growth < MEGABYTES_GROWTH, f"memory grew by {growth:.0f} MiB: {[round(m) for m in memory]}"
    assert late < MEGABYTES_FLAT or seconds < 60, f"memory isn't flat in the second half: {[round(m) for m in memory]}"
    return (
        f"soak, {draft}: {seconds:.0f} s, {counts['completed']} requests completed, "
        f"{left} left by their clients ({aborted} completions aborted), {counts['tokens']} tokens to the end, "
        f"{stats['generation_tokens_total']} in all, {stats['rounds_total']} rounds, accept len "
        f"{stats['avg_spec_accept_length']:.2f}, {stats['preemptions_total']} preemptions, {compared} cases equal to "
        f"themselves alone, memory {[round(each) for each in memory]} MiB"
    )


def check_balance(llm: AsyncLLM) -> None:
    """Nothing is left: no request, no stream, no slot; every page is free or the prefix tree's, and then free."""
    assert llm.error is None
    stats = llm.stats()
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert not llm._streams
    audit(llm.engine.scheduler)
    assert stats["free_pages"] + stats["cached_pages"] == stats["total_pages"]
    assert llm.engine.flush_cache()
    assert llm.stats()["free_pages"] == stats["total_pages"]


def check_answers(tally: Tally, work: list[Case], plain: LLM) -> int:
    """Each repeatable case that completed said what it says alone, without drafts. Returns how many."""
    repeatable = {index: answer for index, answer in tally.answers.items() if work[index].repeatable}
    for index, answer in repeatable.items():
        case = work[index]
        out = plain.generate([case.prompt], dataclasses.replace(case.params(), speculative=False))[0]
        alone = Answer([c.text for c in out.completions], [c.finish_reason for c in out.completions])
        alone.tokens = sum(len(c.token_ids) for c in out.completions)
        alone.logprobs = answer.logprobs
        assert answer == alone, f"case {index}: {case}"
    return len(repeatable)


@pytest.fixture
def show(pytestconfig):
    """Print past pytest's capture: the figures are wanted of a test that passes, too."""

    def past_capture(line: str) -> None:
        with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\n{line}")

    return past_capture


def test_a_short_soak_leaves_nothing_behind(show):
    short = [case for case in cases(20, "ngram") if not any("logprobs" in name for name in case.settings)]  # programs
    summary = soak("ngram", short, seconds=3)
    show(summary)


@pytest.mark.soak
@pytest.mark.timeout(0)  # as long as $SOAK_SECONDS says
def test_a_long_soak_leaves_nothing_behind(show):
    summary = soak("standalone", cases(260, "standalone"), SECONDS)
    show(summary)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_accepted_drafts_and_preemptions_leave_texts_and_memory_as_they_were(show):
    summary = soak("ngram", repeating(32), SECONDS, demo.NAME, clients=8)
    show(summary)
    figure = lambda pattern: float(re.search(pattern, summary)[1])  # noqa: E731
    assert figure(r"accept len ([\d.]+)") > 1.5
    # Hundreds in ten minutes, where a machine has the time for as many requests.
    assert figure(r"(\d+) preemptions") > figure(r"(\d+) requests completed") / 2
