#!/usr/bin/env bash
# Adaptive drafting beside fixed numbers of drafts and plain decoding, on a machine with one GPU that has Python and jax
# with CUDA, but not this project installed. From the repository's root, each part in two minutes or less:
#
#     scripts/gpu/adaptive.sh OUT [PART...]
#
# PART is of: demo qwen many ragged dspark tree hybrid; the first by default. OUT receives a JSON file, a log and a chart for each.
# Each part is one process, whose programs compile at once; its settings then take turns, TURNS (3) of them, each of
# LENGTH (96) tokens a request. Needed as well, as wheels on PYTHONPATH where they aren't installed: gguf. SMOLLM2 is the demo model's GGUF
# file; QWEN, HYBRID, EAGLE3 and DSPARK are folders with a config.json (weights are made up), of Qwen3-8B,
# Qwen3.5-35B-A3B, and Qwen3-8B's drafters.
. "$(dirname "$0")/common.sh"

# bench NAME ARGUMENTS...: one comparison; progress goes to NAME.log
bench() {
    local name=$1
    shift
    echo "== $name"
    python3 -m jaxspec.bench adaptive --turns "${TURNS:-3}" --output-len "${LENGTH:-96}" "$@" --json "$out/$name.json" \
        --plot "$out/$name.png" 2>"$out/$name.log" || { status=1; tail -n 5 "$out/$name.log"; }
}

# Three drafts that yield 1.2, 1.9 and 4 tokens a round (2.6 mixed), and as the demo's EAGLE-3 does
few=(--accept-rates 0.17,0.15,0.15) some=(--accept-rates 0.55,0.45,0.4) all=(--accept-rates 1,1,1)
mixed=(--accept-rates 0.17,0.15,0.15/1,1,1)
for part in "${@:-demo}"; do
    case $part in
        demo) bench demo --model "$SMOLLM2" --draft eagle3:jaxspec/drafters/shipped/smollm2-135m-instruct-eagle3 \
            --load-format auto --concurrency 1,2,4,8,16,32,64,128,256 "${few[@]}" "${some[@]}" "${mixed[@]}" \
            --rise-and-fall 0.25 ;;
        qwen) bench qwen --model "$QWEN" --draft "eagle3:$EAGLE3" --concurrency 1,2,4,8,16,32 "${few[@]}" "${some[@]}" \
            "${all[@]}" "${mixed[@]}" --rise-and-fall 0.25 ;;
        many) bench many --model "$QWEN" --draft "eagle3:$EAGLE3" --concurrency 64,128,256 --prompt-len 128 "${few[@]}" \
            "${some[@]}" "${all[@]}" "${mixed[@]}" ;;
        ragged) bench ragged --model "$QWEN" --draft "eagle3:$EAGLE3" --draft-policy ragged --concurrency 32,128 \
            --prompt-len 128 "${mixed[@]}" "${some[@]}" ;;
        dspark) bench dspark --model "$QWEN" --draft "dspark:$DSPARK" --concurrency 1,8,32,128 --prompt-len 1024 \
            --output-len 256 --max-total-tokens 190000 --accept-rates 0.924,0.924,0.924,0.924,0.924,0.924,0.924 ;;
        tree) # EAGLE-3's acceptance on Spec-Bench, by position of a chain and by level of a tree
            bench chain --model "$QWEN" --draft "eagle3:$EAGLE3" --concurrency 1,8,32 --prompt-len 1024 \
                --accept-rates 0.69,0.70,0.75,0.81,0.83
            bench tree --model "$QWEN" --draft "eagle3:$EAGLE3" --concurrency 1,8,32 --prompt-len 1024 \
                --topk 4 --num-steps 5 --num-draft-tokens 16 --accept-rates 0.86,0.81,0.79,0.76,0.79 ;;
        hybrid) bench hybrid --model "$HYBRID" --draft mtp --concurrency 1,8,32,128 "${few[@]}" "${some[@]}" "${all[@]}" \
            "${mixed[@]}" ;;
        *) echo "no part $part" >&2; exit 2 ;;
    esac
done
exit $status
