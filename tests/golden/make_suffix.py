"""Make tests/golden/suffix.json: what ArcticInference's `SuffixDecodingCache` drafts while requests come and go.

Needs arctic-inference 0.3.0, of which the C++ extension is enough. From its source distribution, with nanobind 2.9.2:

    cmake -S csrc/suffix_decoding -B build && cmake --build build
    cp build/_C*.so arctic_inference/suffix_decoding/
    PYTHONPATH=. python .../tests/golden/make_suffix.py

The file is a list of streams: `depth`, `cached` (the cache's two arguments) and `calls` in order. A call is a method's
name and its arguments; of `speculate`, the context is the request's whole text, which isn't repeated, then come the
most tokens, the factor and the least probability, then the result: tokens, probabilities, length of the match.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from arctic_inference.suffix_decoding.cache import SuffixDecodingCache

STREAMS, STEPS = 24, 16


def stream(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    vocab, depth, cached = (int(rng.choice(among)) for among in ([2, 5, 20], [4, 8, 24], [-1, -1, 0, 1, 3]))
    cache, source = SuffixDecodingCache(depth, cached), rng.integers(0, vocab, 60)
    texts, calls, started = {}, [], 0

    def some(most: int) -> list[int]:
        at, n = rng.integers(0, 40), int(rng.integers(1, most + 1))
        return (source[at : at + n] if rng.random() < 0.7 else rng.integers(0, vocab, n)).tolist()

    def call(name: str, request: int, *arguments) -> None:
        getattr(cache, name)(request, *arguments)
        calls.append([name, request, *arguments])

    for _ in range(STEPS):
        if len(texts) < 3 and (not texts or rng.random() < 0.5):
            texts[started] = some(20)
            call("start_request", started, list(texts[started]))
            started += 1
        request = int(rng.choice(list(texts)))
        new = some(6)
        call("add_active_response", request, new)
        texts[request] += new
        for each, text in texts.items():
            how = int(rng.choice([1, 4, 8])), float(rng.choice([0.5, 1.0, 2.0])), float(rng.choice([0.05, 0.1, 0.3]))
            draft = cache.speculate(each, text, how[0], how[1], 0.0, how[2])
            probs = [round(p, 6) for p in draft.probs]
            calls.append(["speculate", each, *how, [list(draft.token_ids), probs, draft.match_len]])
        if rng.random() < 0.2:
            call("stop_request", request)
            del texts[request]
    return {"depth": depth, "cached": cached, "calls": calls}


if __name__ == "__main__":
    rows = ",\n".join(json.dumps(stream(seed), separators=(",", ":")) for seed in range(STREAMS))
    Path(__file__).with_name("suffix.json").write_text(f"[{rows}]\n")
