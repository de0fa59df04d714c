"""One table of what `scripts/gpu/setups.sh` left in a folder: `python scripts/setups_table.py OUT`.

Published figures are of the pull requests' own machines; vLLM 0.26's are of four H200s (over two for 35B).
"""

import json
import sys
from pathlib import Path

LLAMA2 = "Llama-2-70B, 500 requests, requests/s"
NEXT = "Qwen3-Next-80B, MTP, output tokens/s at"
NEXT_ON = {1: 333, 2: 544, 4: 991, 8: 1534, 16: 2303, 32: 3314, 64: 3890, 128: 3761}
# vLLM's rounds, over two (35B) and four, and its output tokens a second under a load of 256
VLLM_MTP = {1: 6.92, 8: 10.4, 32: 14.1, 128: 25.8}
VLLM_ROUNDS = {
    "large-rounds": ("Llama-3.3-70B FP8", {1: 9.10, 8: 9.54, 32: 12.7, 128: 16.3}),
    "next-rounds": ("Qwen3-Next-80B, MTP", {1: 9.91, 8: 12.4, 32: 16.0, 128: 26.7}),
    "next-plain": ("Qwen3-Next-80B", dict.fromkeys((1, 8, 32, 128))),
    "largest-rounds": ("Qwen3.5-397B FP8, MTP", dict.fromkeys((1, 8, 32, 128))),
}
VLLM_LOADS = {
    "dense-load": ("Qwen3-8B", 8873),
    "hybrid-load": ("35B-A3B FP8, MTP", 6098),
    "large-load": ("Llama-3.3-70B FP8", 3248),
    "next-load": ("Qwen3-Next-80B, MTP", 5021),
}
# Of each row: the part, its set-up, what picks the benchmark's rows, the figure's key, published, vLLM's
ROWS = [
    *[
        ("mtp", f"35B-A3B FP8, MTP, {rate} a second: {what}", {"request_rate": str(rate)}, key, published, None)
        for rate, itl in ((1, 2.89), (5, 5.56))
        for what, key, published in (("TPOT ms", "tpot_mean_ms", itl), ("TTFT ms", "ttft_mean_ms", 147))
    ],
    *[
        ("mtp-overlap", f"35B-A3B FP8, MTP, {n} requests: ms a round", {"concurrency": n}, "ms_per_round", None, ms)
        for n, ms in VLLM_MTP.items()
    ],
    *[
        ("dflash", f"Qwen3-8B, DFlash, {n} requests: tokens/s", {"concurrency": n}, "tokens_per_s", published, None)
        for n, published in ((1, None), (32, "9,688 off, 12,360 on"))
    ],
    ("none", f"{LLAMA2}: no drafter", {}, "requests_per_s", 0.62, None),
    ("tree-4", f"{LLAMA2}: tree (2,4,4)", {}, "requests_per_s", 0.52, None),
    ("tree-2", f"{LLAMA2}: tree (1,2,2)", {}, "requests_per_s", 0.56, None),
    ("one", f"{LLAMA2}: one draft", {}, "requests_per_s", 0.68, None),
    *[
        (f"{part}-overlap", f"Llama-2-70B, {part}, {n} requests: ms a round", {"concurrency": n}, "ms_per_round", None,
         None)
        for part in ("one", "tree-4", "tree-2")
        for n in (1, 8, 32, 128)
    ],
    *[
        (f"next-{'few' if n < 32 else 'many'}", f"{NEXT} {n}", {"concurrency": n}, "output_tokens_per_s", published,
         None)
        for n, published in NEXT_ON.items()
    ],
    *[
        (f"next-{'few' if n < 32 else 'many'}-off", f"{NEXT} {n}, overlap off", {"concurrency": n},
         "output_tokens_per_s", published, None)
        for n, published in {1: 259.9, 8: 1237.5, 32: 2874, 128: 3415}.items()
    ],
    *[
        ("next-prefix", f"Qwen3-Next-80B, shared prefixes, 10 a second: {what}", {"request_rate": "10"}, key, published,
         None)
        for what, key, published in (
            ("output tokens/s", "output_tokens_per_s", 1645), ("TTFT ms", "ttft_mean_ms", 11952),
            ("TPOT ms", "tpot_mean_ms", 27.2),
        )
    ],
    ("largest", "Qwen3.5-397B FP8, MTP, one stream: tokens/s", {"concurrency": 1}, "tokens_per_s", 324, None),
    *[
        (part, f"{model}, {n} requests: ms a round", {"concurrency": n}, "ms_per_round", None, ms)
        for part, (model, rounds) in VLLM_ROUNDS.items()
        for n, ms in rounds.items()
    ],
    *[
        (part, f"{model}, load of 256: output tokens/s", {}, "output_tokens_per_s", None, rate)
        for part, (model, rate) in VLLM_LOADS.items()
    ],
]  # fmt: skip


def measured(folder: Path, part: str, picks: dict, key: str) -> tuple[str, str]:
    """A figure, with overlap and its gain where there is such, and of how many requests it is."""
    file = folder / f"{part}.json"
    rows = json.loads(file.read_text())["rows"] if file.is_file() else []
    found = [row for row in rows if all(row.get(name) == value for name, value in picks.items()) and key in row]
    if "request_rate" not in picks:
        found = [row for row in found if row.get("request_rate") is None]
    shown = [shown_as(row[key]) + (f" {row['overlap']}" if "overlap" in row else "") for row in found]
    gains = [f"({row['overlap_gain']:+.0%})" for row in found if row.get("overlap_gain")]
    counts = {f"{row['completed']:,}" for row in found if "completed" in row}
    return ", ".join(shown) + "".join(f" {gain}" for gain in gains), ", ".join(counts)


def shown_as(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def main() -> None:
    folder = Path(sys.argv[1])
    print("| set-up | published | vLLM here | jaxspec | its requests |\n|---|---|---|---|---|")
    for part, name, picks, key, published, peer in ROWS:
        ours, requests = measured(folder, part, picks, key)
        if ours:
            print(f"| {name} | {shown_as(published)} | {shown_as(peer)} | {ours} | {requests} |")
    if (start := folder / "start" / "start.md").is_file():
        print("\n" + start.read_text())


if __name__ == "__main__":
    main()
