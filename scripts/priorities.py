"""Wait of urgent requests behind a queue: `python -m scripts.priorities MODEL [options]`.

So many requests wait for so few slots. From time to time an urgent one comes, by `--schedule-policy priority`. Printed
are its time to the first token on the idle engine and behind the queue, and the limit: two rounds and a chunk of a
prompt more than idle. Last, how long the request at the end of the queue waited: nothing starves.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from jaxspec import LLM, SamplingParams
from jaxspec.engine.engine import Engine


def first_token(engine: Engine, prompt: list[int], params: SamplingParams) -> float:
    """Seconds until an urgent request has its first token. The others go on meanwhile."""
    request, began = engine.prepare(prompt, params, priority=-1000), time.perf_counter()
    engine.add(request)
    while not any(delta.request_id == request.id and delta.token_ids for delta in engine.step()):
        pass
    return time.perf_counter() - began


def p99(seconds: list[float]) -> float:
    return 1e3 * float(np.percentile(seconds, 99))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--draft", default="none")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--queue", type=int, default=512)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of a prompt, and of a chunk")
    parser.add_argument("--urgent", type=int, default=40, help="urgent requests")
    parser.add_argument("--every", type=int, default=5, help="steps between them")
    given = parser.parse_args()
    options = {"max_running_requests": given.slots, "schedule_policy": "priority", "load_format": given.load_format}
    options |= {"chunked_prefill_size": given.tokens, "disable_structured_output": True, "disable_prefix_cache": True}
    options |= {"skip_warmup": True, "few_programs": True, "draft_policy": "fixed", "max_total_tokens": 4096}
    engine = LLM(given.model, given.draft, context_length=4 * given.tokens, **options).engine
    rng, short = np.random.default_rng(0), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    params = SamplingParams(temperature=0.0, max_tokens=given.tokens // 2, ignore_eos=True)
    prompt = lambda: rng.integers(0, engine.model_config.vocab_size, given.tokens).tolist()  # noqa: E731

    def measured(queue: int, count: int) -> tuple[list[float], list[float], list[float]]:
        """Seconds to the first token of urgent requests behind so many, of steps, and to each of those requests'."""
        crowd, urgent, steps, first = {engine.prepare(prompt(), params) for _ in range(queue)}, [], [], {}
        for request in crowd:
            engine.add(request)
        began = time.perf_counter()
        while engine.busy:
            for _ in range(given.every):
                started = time.perf_counter()
                deltas = engine.step()
                now = time.perf_counter()
                steps.append(now - started)
                first |= {each.request_id: now - began for each in deltas if each.request_id not in first}
            if len(urgent) < count:
                urgent.append(first_token(engine, prompt(), short))
        return urgent, steps, list(first.values())

    measured(2 * given.slots, 3)  # which compiles
    idle = [first_token(engine, prompt(), short) for _ in range(given.urgent)]
    before = engine.stats()["preemptions_total"]
    urgent, steps, first = measured(given.queue, given.urgent)
    preempted = engine.stats()["preemptions_total"] - before
    limit = p99(idle) + 3e3 * float(np.median(steps))  # a step has a round, and a chunk of a prompt if one waits
    print(f"first token at p99 of {given.urgent} urgent requests: idle {p99(idle):.1f} ms")
    print(f"behind {given.queue} others {p99(urgent):.1f} ms; two rounds and a chunk more than idle: {limit:.1f}")
    print(f"{len(first)} of {given.queue} others served, the last from {max(first):.1f} s on; {preempted} preemptions")
    return int(p99(urgent) > limit)


if __name__ == "__main__":
    sys.exit(main())
