#!/usr/bin/env bash
# Adaptive drafting beside fixed numbers of drafts and plain decoding, on a machine with one GPU that has Python and jax
# with CUDA, but not this project installed. From the repository's root, each part in under five minutes:
#
#     scripts/gpu/adaptive.sh OUT [PART...]
#
# PART is of: demo qwen; the first by default. OUT receives a JSON file and a log for each engine, and PART.md: start times
# with empty caches, programs, and tokens a second by requests at once. Needed as well, as wheels on PYTHONPATH where they
# aren't installed: gguf. SMOLLM2 is the demo model's GGUF file, SPECBENCH Spec-Bench's question.jsonl; QWEN a folder with
# Qwen3-8B's config.json (weights are made up), EAGLE3 one with its drafter's.
set -uo pipefail
cd "$(dirname "$0")/../.."
[ $# -ge 1 ] || { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
status=0

# bench NAME SECONDS ARGUMENTS...: one benchmark with caches of its own, its log and progress bars in a file
bench() {
    local name=$1 limit=$2
    shift 2
    echo "== $name"
    JAXSPEC_CACHE=$out/cache-$name timeout "$limit" python3 -m jaxspec.bench "$@" --json "$out/$name.json" \
        2>"$out/$name.log" || { status=1; tail -n 5 "$out/$name.log"; }
    rm -rf "$out/cache-$name"
}

# table FILE...: seconds to start, programs compiled then and later, and tokens a second by requests at once, as Markdown
table() {
    python3 - "$@" <<'END'
import json, re, sys
from collections import defaultdict
from pathlib import Path

found = {Path(path).stem: json.loads(Path(path).read_text()) for path in sys.argv[1:]}
logs = {name: Path(sys.argv[1]).with_name(f"{name}.log").read_text() for name in found}
programs = {name: each[-1] for name, log in logs.items() if (each := re.findall(r"compiling: 100%.*?(\d+)/\d+ \[", log))}
rates = defaultdict(lambda: defaultdict(list))
for name, document in found.items():
    for row in document["rows"]:
        rates[name][row["concurrency"]].append(row.get("output_tokens_per_s") or row["tokens_per_s"] or 0.0)
counts = sorted({count for each in rates.values() for count in each})
print("| engine | start, s | programs | compiled later |", *(f"{count} |" for count in counts))
print("|---" * (4 + len(counts)) + "|")
for name, document in found.items():
    later = sum(row["compiles"] for row in document["rows"])
    each = [f"{sum(rates[name][count]) / max(len(rates[name][count]), 1):.0f} |" for count in counts]
    print(f"| {name} | {document['facts']['ready_s']:.1f} | {programs.get(name, 0)} | {later} |", *each)
END
}

for part in "${@:-demo}"; do
    case $part in
        demo) # 256 slots for each; greedy, 64 new tokens at most of each of four times as many questions as at once
            load=(serve --model "$SMOLLM2" --via offline --dataset spec-bench --data "$SPECBENCH" --output-len 64
                --concurrency 1,1,4,4,16,64,256 --max-running-requests 256)
            drafts=(--draft eagle3:jaxspec/drafters/shipped/smollm2-135m-instruct-eagle3 --num-draft-tokens)
            bench demo-auto 170 "${load[@]}" "${drafts[@]}" 3
            bench demo-fixed-3 100 "${load[@]}" "${drafts[@]}" 3 --draft-policy fixed
            bench demo-fixed-1 100 "${load[@]}" "${drafts[@]}" 1 --draft-policy fixed --disable-structured-output
            bench demo-plain 100 "${load[@]}" --draft none --disable-structured-output ;;
        qwen) # random text, each draft accepted by a coin: low yields 1.3 tokens a round of three drafts, high 3.2
            load=(decode --model "$QWEN" --concurrency 1,4,16,64,128 --prompt-len 256 --output-len 256
                --max-running-requests 128 --disable-structured-output)
            drafts=(--draft "eagle3:$EAGLE3" --num-draft-tokens)
            low=0.25,0.2,0.2 high=0.85,0.85,0.85
            for rates in low high; do
                bench "qwen-$rates-auto" 110 "${load[@]}" "${drafts[@]}" 3 --accept-rates "${!rates}" --draft-policy auto
            done
            bench qwen-low-fixed-3 70 "${load[@]}" "${drafts[@]}" 3 --accept-rates "$low" --skip-warmup
            bench qwen-low-fixed-1 70 "${load[@]}" "${drafts[@]}" 1 --accept-rates 0.25 --skip-warmup
            bench qwen-plain 70 "${load[@]}" --skip-warmup ;;
        *) echo "no part $part" >&2; exit 2 ;;
    esac
    table "$out/$part"-*.json | tee "$out/$part.md"
done
exit $status
