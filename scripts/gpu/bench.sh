#!/usr/bin/env bash
# The figures of docs/measurements/, on a machine with one H200 that has Python, jax with CUDA, flax, transformers and
# matplotlib, but not this project installed. From the repository's root:
#
#     scripts/gpu/bench.sh OUT [PART...]
#
# PART is of: decode prefill ngram eagle3 dflash crossover kernels moe hybrid load serve start smollm2 parity accuracy;
# all by default, in that order. OUT receives a JSON file, a PNG and a log for each. Needed as well, as wheels on
# PYTHONPATH where they aren't installed: gguf, and for serve fastapi, uvicorn and pydantic. QWEN is a folder
# with Qwen3-8B's config.json (weights are made up) and a tokenizer, EAGLE3 and DFLASH folders with its drafters'
# config.json, QWEN_MOE and QWEN_HYBRID the same of Qwen3-30B-A3B and Qwen3.5-35B-A3B; SMOLLM2 the demo model's GGUF
# file; SPECBENCH Spec-Bench's question.jsonl.
. "$(dirname "$0")/common.sh"

# bench NAME SECONDS ARGUMENTS...: one benchmark, its progress bars out of the log
bench() {
    local name=$1 limit=$2
    shift 2
    echo "== $name"
    timeout "$limit" python3 -m jaxspec.bench "$@" --json "$out/$name.json" --plot "$out/$name.png" 2>"$out/$name.log" ||
        { status=1; tail -n 5 "$out/$name.log"; }
}

for part in "${@:-decode prefill ngram eagle3 dflash crossover kernels moe hybrid load serve start smollm2 parity accuracy}"; do
    for part in $part; do
        case $part in
            decode) bench decode 240 decode --model "$QWEN" --overlap both --back-to-back ;;
            prefill) bench prefill 150 prefill --model "$QWEN" --max-running-requests 128 ;;
            ngram) bench ngram 200 decode --model "$QWEN" --draft ngram --accept-rates 0.75,0.5,0.25 --back-to-back \
                --skip-warmup ;;
            eagle3) bench eagle3 240 decode --model "$QWEN" --draft "eagle3:$EAGLE3" --accept-rates 0.75,0.5,0.25 \
                --back-to-back --skip-warmup ;;
            dflash) bench dflash 240 decode --model "$QWEN" --draft "dflash:$DFLASH" --back-to-back --skip-warmup \
                --accept-rates "$(python3 -c 'print(*[0.87] * 15, sep=",")')" ;;
            crossover)
                many=(decode --model "$QWEN" --concurrency 1,8,32,64,128,256)
                drafts=(--draft "eagle3:$EAGLE3" --accept-rates)
                mkdir -p "$out/crossover"
                bench crossover/none 240 "${many[@]}"
                bench crossover/one-draft 240 "${many[@]}" "${drafts[@]}" 0.75 --num-steps 1
                bench crossover/three-drafts 240 "${many[@]}" "${drafts[@]}" 0.75,0.5,0.25
                python3 -m jaxspec.bench report "$out/crossover" --plot "$out/crossover.png" || status=1 ;;
            kernels) bench kernels 180 kernels ;;
            moe) bench moe 240 decode --model "$QWEN_MOE" && bench moe-prefill 150 prefill --model "$QWEN_MOE" ;;
            hybrid)
                bench hybrid 400 decode --model "$QWEN_HYBRID" --skip-warmup
                bench hybrid-mtp 400 decode --model "$QWEN_HYBRID" --draft mtp --accept-rates 0.75,0.5,0.25 --skip-warmup
                bench hybrid-prefill 300 prefill --model "$QWEN_HYBRID" --skip-warmup ;;
            load)
                many=(load --model "$QWEN" --num-prompts 512 --request-rate 70%,90%)
                bench load 300 "${many[@]}"
                bench load-eagle3 400 "${many[@]}" --draft "eagle3:$EAGLE3" --accept-rates 0.75,0.667,0.5
                bench load-mixed 300 load --model "$QWEN" --prompt-len 64-512:9,8192:1 --output-len 32-256 \
                    --concurrency 64 --request-rate 70% --max-itl-ms 50 ;;
            serve) bench serve 240 serve --model "$QWEN" --load-format dummy --concurrency 128 --via both ;;
            start) # the second of two starts finds what the first compiled
                for name in cold warm; do
                    JAXSPEC_CACHE=$out/cache bench "start-$name" 150 decode --model "$QWEN" --concurrency 1 \
                        --output-len 32 --max-running-requests 128
                done
                rm -rf "$out/cache" ;;
            smollm2) for draft in none ngram; do
                    bench "smollm2-$draft" 120 serve --model "$SMOLLM2" --draft "$draft" --dataset spec-bench \
                        --data "$SPECBENCH" --num-prompts 40 --concurrency 1
                done ;;
            parity) bench parity 240 parity --model "$SMOLLM2" --dtype bfloat16 --draft ngram --data "$SPECBENCH" ;;
            accuracy) bench accuracy 600 accuracy --model "$SMOLLM2" --dtype bfloat16 --data "$SPECBENCH" \
                --num-prompts 200 --output-len 128 --concurrency 64 --formats weights,activations,int4,nvfp4 \
                --draft ngram --draft suffix --draft eagle3 --draft dflash ;;
            *) echo "no part $part" >&2; exit 2 ;;
        esac
    done
done
exit $status
