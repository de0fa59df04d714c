#!/usr/bin/env bash
# The same bits and the portable path, on one Hopper GPU: what docs/determinism.md and docs/hardware.md say was seen. From
# the repository's root, with jax and CUDA installed, but not this project:
#
#     scripts/gpu/deterministic.sh OUT [PART...]
#
# PART is of: texts soak parity hybrid prompts; all by default, in that order. SMOLLM2 is the demo model's GGUF file,
# SPECBENCH Spec-Bench's question.jsonl. SECONDS_OF_LOAD: how long the soak's clients come (150); as long again goes into
# running cases alone. OUT receives logs, tables and JSON.
. "$(dirname "$0")/common.sh"
python3 scripts/configs.py "$out/models" || exit
eagle3=eagle3:jaxspec/drafters/shipped/smollm2-135m-instruct-eagle3
demo=(--option dtype=bfloat16 --option context_length=2048 --option max_running_requests=128 --option few_programs=true
    --option mem_fraction_static=0.2)

# told NAME COMMAND...: in the background, its output in a log whose end is shown
told() {
    local name=$1
    shift
    ( "$@" >"$out/$name.txt" 2>"$out/$name.log"; ended=$?; echo "== $name, status $ended"; tail -n 9 "$out/$name.txt"
      [ $ended = 0 ] || tail -n 5 "$out/$name.log"; exit $ended ) &
}

# ended: wait for all of a part
ended() {
    for job in $(jobs -p); do wait "$job" || status=1; done
}

# timed NAME SHARE COMMAND...: one benchmark of several that are timed one after the other
timed() {
    local name=$1 share=$2
    shift 2
    told "$name" env XLA_PYTHON_CLIENT_MEM_FRACTION="$share" python3 scripts/gpu/in_turn.py "$out/lock" "$@" \
        --load-format dummy --disable-structured-output --json "$out/$name.json"
}

for part in "${@:-texts soak parity hybrid prompts}"; do
    for part in $part; do
        case $part in
            texts)
                same=(python3 scripts/same_bits.py "$SMOLLM2")
                with=(--prompts "$SPECBENCH" --count 200 --tokens 160 --option deterministic=true "${demo[@]}")
                export XLA_PYTHON_CLIENT_PREALLOCATE=false
                told plain "${same[@]}" "$out/plain.json" "${with[@]}" --at 128,8,1 --option draft=none
                told eagle3 "${same[@]}" "$out/eagle3.json" "${with[@]}" --at 128,8,128off --option draft="$eagle3" \
                    --option num_draft_tokens=3 --option draft_policy=fixed
                ended
                unset XLA_PYTHON_CLIENT_PREALLOCATE
                python3 scripts/same_bits.py --compare "$out/plain.json" "$out/eagle3.json" || status=1 ;;
            soak)
                told soak python3 scripts/soak.py "$SMOLLM2" --prompts "$SPECBENCH" --seconds "${SECONDS_OF_LOAD:-150}" \
                    --cases 60 --tokens 96 --drafts "$eagle3" "${demo[@]}" --option max_total_tokens=16384
                ended ;;
            parity)
                for dtype in bfloat16 float32; do
                    told "parity-$dtype" env XLA_PYTHON_CLIENT_MEM_FRACTION=0.2 python3 -m jaxspec.bench parity \
                        --model "$SMOLLM2" --data "$SPECBENCH" --num-prompts 80 --output-len 128 --concurrency 32 \
                        --max-running-requests 32 --draft ngram --kernels portable --dtype "$dtype" \
                        --context-length 2048 --json "$out/parity-$dtype.json"
                done
                told portable env XLA_PYTHON_CLIENT_MEM_FRACTION=0.2 python3 -m pytest -q -m gpu tests/gpu/test_portable.py \
                    -k greedy_text
                ended ;;
            hybrid)
                rounds=(decode --model "$out/models/qwen3.8-27b-16" --context-length 2048 --output-len 128
                    --disable-prefix-cache)
                timed hybrid 0.3 "${rounds[@]}" --max-running-requests 128 --concurrency 1,8,32,128
                timed hybrid-deterministic 0.3 "${rounds[@]}" --max-running-requests 128 --concurrency 1,8,32,128 \
                    --deterministic
                timed hybrid-portable 0.3 "${rounds[@]}" --max-running-requests 32 --concurrency 1,8,32 \
                    --kernels portable
                ended ;;
            prompts)
                prefill=(prefill --model "$out/models/qwen3-8b" --lengths "1024,8192" --max-running-requests 32
                    --few-programs --context-length 9216 --max-total-tokens 32768)
                timed prompts 0.45 "${prefill[@]}"
                timed prompts-portable 0.45 "${prefill[@]}" --kernels portable
                ended ;;
            *) echo "no part $part" >&2; exit 2 ;;
        esac
    done
done
exit $status
