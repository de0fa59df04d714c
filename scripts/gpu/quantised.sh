#!/usr/bin/env bash
# Rounds, kernels and prompts of quantised models on one Hopper GPU: the tables of docs/measurements/fp8.md.
# From the repository's root, with jax and CUDA installed, but not this project:
#
#     scripts/gpu/quantised.sh OUT [PART...]
#
# PART is of: kernels dense cache eagle3 turns 30b 35b mtp 27b gpt-oss prefill; all by default, in that order. `turns`
# has rows that are quantised and rows that aren't by turns; so have turns-few, turns-128 and turns-35b. A part's
# engines start side by side and are timed one after the other (in_turn.py); their shares of memory are an H200's. A GPU
# of 80 GB runs those that fit. OUT receives for each engine its table, its kernels, JSON and a log. LIMIT: seconds that
# an engine may take (240).
. "$(dirname "$0")/common.sh"
python3 scripts/configs.py "$out/models" || exit

# bench NAME SHARE ARGUMENTS...: one benchmark with this share of the GPU's memory
bench() {
    local name=$1 share=$2
    shift 2
    (
        XLA_PYTHON_CLIENT_MEM_FRACTION=$share timeout "${LIMIT:-240}" python3 scripts/gpu/in_turn.py "$out/lock" "$@" \
            --load-format dummy --disable-structured-output --json "$out/$name.json" >"$out/$name.txt" 2>"$out/$name.log"
        ended=$?
        echo "== $name"
        [ $ended = 0 ] && cat "$out/$name.txt" || { tail -n 5 "$out/$name.log"; exit $ended; }
    ) &
}

# rounds NAME SHARE MODEL N ARGUMENTS...: rounds of N requests; 8 stands for 1 and 8
rounds() {
    local name=$1 share=$2 model=$3 requests=$4 sizes=(--few-programs)
    shift 4
    [ "$requests" = 8 ] && sizes=(--concurrency 1,8) || sizes+=(--concurrency "$requests")
    bench "$name-$requests" "$share" decode --model "$out/models/$model" --max-running-requests "$requests" \
        "${sizes[@]}" --context-length 2048 --output-len 256 --profile "$@"
}

fp8=(--quantization fp8)
drafts=(--num-steps 3 --accept-rates 0.75,0.5,0.25 --draft-quantization fp8)
eagle3=("${fp8[@]}" --draft "eagle3:$out/models/qwen3-8b-eagle3" "${drafts[@]}")
for part in "${@:-kernels dense cache eagle3 turns 30b 35b mtp 27b gpt-oss prefill}"; do
    for part in $part; do
        case $part in
            kernels) timeout "${LIMIT:-240}" python3 -m jaxspec.bench kernels --only FP8 --no-plain --profile \
                --json "$out/kernels.json" 2>"$out/kernels.log" | tee "$out/kernels.txt" ;;
            dense)
                rounds dense 0.14 qwen3-8b 8 "${fp8[@]}"
                rounds dense 0.18 qwen3-8b 32 "${fp8[@]}"
                rounds dense 0.34 qwen3-8b 128 "${fp8[@]}" ;;
            cache)
                rounds cache 0.14 qwen3-8b 8 "${fp8[@]}" --kv-cache-dtype fp8
                rounds cache 0.16 qwen3-8b 32 "${fp8[@]}" --kv-cache-dtype fp8
                rounds cache 0.26 qwen3-8b 128 "${fp8[@]}" --kv-cache-dtype fp8 ;;
            eagle3)
                rounds eagle3 0.16 qwen3-8b 8 "${eagle3[@]}"
                rounds eagle3 0.20 qwen3-8b 32 "${eagle3[@]}"
                rounds eagle3 0.40 qwen3-8b 128 "${eagle3[@]}" ;;
            turns)
                for switch in off on; do
                    rounds "$switch" 0.12 qwen3-8b 8 "${fp8[@]}" --fp8-activations "$switch"
                    rounds "$switch" 0.14 qwen3-8b 32 "${fp8[@]}" --fp8-activations "$switch"
                done
                rounds on 0.34 qwen3-8b 128 "${fp8[@]}" --fp8-activations on
                wait
                for switch in off on; do
                    rounds "$switch-eagle3" 0.14 qwen3-8b 8 "${eagle3[@]}" --fp8-activations "$switch"
                    rounds "$switch-eagle3" 0.16 qwen3-8b 32 "${eagle3[@]}" --fp8-activations "$switch"
                done
                rounds off 0.34 qwen3-8b 128 "${fp8[@]}" --fp8-activations off ;;
            turns-few)
                for switch in off on; do
                    rounds "$switch" 0.12 qwen3-8b 32 "${fp8[@]}" --fp8-activations "$switch"
                done
                rounds on 0.29 qwen3-8b 128 "${fp8[@]}" --fp8-activations on
                rounds on-eagle3 0.13 qwen3-8b 32 "${eagle3[@]}" --fp8-activations on ;;
            turns-128) for switch in off on; do
                rounds "$switch-eagle3" 0.42 qwen3-8b 128 "${eagle3[@]}" --fp8-activations "$switch"
            done ;;
            turns-35b) for switch in off on; do
                rounds "35b-$switch" 0.45 qwen3.5-35b-a3b 32 "${fp8[@]}" --fp8-activations "$switch"
            done ;;
            30b)
                rounds 30b 0.27 qwen3-30b-a3b 8 "${fp8[@]}"
                rounds 30b 0.29 qwen3-30b-a3b 32 "${fp8[@]}"
                rounds 30b 0.39 qwen3-30b-a3b 128 "${fp8[@]}" ;;
            35b)
                rounds 35b 0.32 qwen3.5-35b-a3b 8 "${fp8[@]}"
                wait
                rounds 35b 0.38 qwen3.5-35b-a3b 32 "${fp8[@]}"
                rounds 35b 0.50 qwen3.5-35b-a3b 128 "${fp8[@]}" ;;
            mtp)
                rounds mtp 0.36 qwen3.5-35b-a3b 8 "${fp8[@]}" --draft mtp "${drafts[@]}"
                rounds mtp-27b 0.42 qwen3.8-27b 8 "${fp8[@]}" --draft mtp "${drafts[@]}"
                wait
                rounds mtp 0.40 qwen3.5-35b-a3b 32 "${fp8[@]}" --draft mtp "${drafts[@]}"
                rounds mtp 0.54 qwen3.5-35b-a3b 128 "${fp8[@]}" --draft mtp "${drafts[@]}" ;;
            27b) rounds 27b 0.40 qwen3.8-27b 8 "${fp8[@]}" ;;
            gpt-oss) for requests in 8 32 128; do
                rounds gpt-oss 0.85 gpt-oss-120b "$requests"
                wait
            done ;;
            prefill) bench prefill 0.5 prefill --model "$out/models/qwen3-8b" "${fp8[@]}" --fp8-activations on \
                --max-running-requests 128 --skip-warmup --repeats 7 --profile ;;
            *) echo "no part $part" >&2; exit 2 ;;
        esac
        for job in $(jobs -p); do wait "$job" || status=1; done
    done
done
exit $status
