#!/usr/bin/env bash
# What structured output costs, on a machine with one GPU that has Python, jax with CUDA and llguidance, but not this
# project installed. From the repository's root, in under six minutes:
#
#     scripts/gpu/structured.sh OUT
#
# OUT receives a JSON file and a log for each model. QWEN is a folder with Qwen3-8B's config.json (weights are made up)
# and a tokenizer, or TOKENIZER is a folder with one; SMOLLM2 is the demo model's GGUF file. Without one of them, its part
# is left out.
. "$(dirname "$0")/common.sh"
[ $# = 0 ] || usage

# bench NAME SECONDS ARGUMENTS...: one benchmark, its progress bars out of the log. Few programs, compiled on first use.
bench() {
    local name=$1 limit=$2
    shift 2
    echo "== $name"
    timeout "$limit" python3 -m jaxspec.bench structured "$@" --context-length 1024 --num-continuous-decode-steps 1 \
        --skip-warmup --json "$out/$name.json" 2>"$out/$name.log" || { status=1; tail -n 5 "$out/$name.log"; }
}

if [ -n "${QWEN:-}" ]; then
    bench qwen3-8b-ngram 220 --model "$QWEN" ${TOKENIZER:+--tokenizer "$TOKENIZER"} --draft ngram --num-draft-tokens 3
fi
if [ -n "${SMOLLM2:-}" ]; then
    bench smollm2-ngram 130 --model "$SMOLLM2" --load-format auto --draft ngram --num-draft-tokens 3
fi
exit $status
