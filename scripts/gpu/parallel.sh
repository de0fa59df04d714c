#!/usr/bin/env bash
# One model over N GPUs of a host: is it right, and how fast. On a machine that has Python, jax with CUDA, flax,
# transformers and pytest, but not this project installed. From the repository's root:
#
#     scripts/gpu/parallel.sh OUT N [PART...]
#
# PART is of: plan kernels sums texts servers local kept dense mixture hybrid large train; by default all, in this order;
# or drafters, of texts the tests with trees, block drafters, token maps, drafters side by side and --deterministic.
#   plan     memory and least times of a round of each model that the parts below time, as `bench plan` predicts them
#   kernels  the sum through peers' memory: ranks as blocks and as devices, and a peer that never comes
#   sums     each way to make a sum, from 2 KB to 2 MB: psum, XLA's one-shot kernel, peers' memory
#   texts    texts are one GPU's, with EAGLE-3, MTP and n-grams, and by each fast path; cached are cold ones
#   servers  two hosts' processes, two engines behind one port, a caller that leaves, and processes that are killed
#   local    on one GPU, kernels at the sizes that large models leave each of 2, 4 and 8
#   kept     a second start finds the first one's programs
#   dense, mixture, hybrid, large  ms a round beside one GPU's, plain and with drafts, and what the host needs of it
#   train    tokens a second of an EAGLE-3 drafter's training over N GPUs and on one
# OUT receives a log and JSON files for each. QWEN, QWEN_MOE, QWEN_HYBRID, LARGE, NEXT and LARGEST are folders with the
# config.json of Qwen3-8B, Qwen3-30B-A3B, Qwen3.5-35B-A3B, Llama-3.3-70B, Qwen3-Next-80B and Qwen3.5-397B-A17B, EAGLE3
# that of Qwen3-8B's drafter (`scripts/configs.py` writes all of them); weights are made up. A part whose model isn't
# named is left out. CONCURRENCY is the numbers of requests (1,8,32,128), LIMIT the seconds of each command (240), FLAGS
# more of the decode benchmark's (`--profile`: the kernels of each row). GPU is what `bench plan` predicts for (h100). In
# two bytes a weight Llama-3.3-70B leaves two H100s 28,672 tokens of KV cache, so its requests are FEW (1,8); 80B needs
# two H200s, and 397B in FP8 four of them or eight H100s. TARGET is the model that the drafter is trained for (the demo's
# GGUF file), ROWS how many of 1,024 tokens a step has on each GPU (16). Needed as well, as wheels on PYTHONPATH where
# they aren't installed: gguf, and what the server and the trainer need. On virtual CPU devices it rehearses all but
# `kernels` and `local`, with tiny models:
#
#     JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 PJRT_NPROC=16 QWEN=... FLAGS="--prompt-len 16 --output-len 48" \
#         CONCURRENCY=1,2 scripts/gpu/parallel.sh OUT 2 sums texts servers kept dense mixture hybrid large
. "$(dirname "$0")/common.sh"
[ $# -ge 1 ] || usage
n=$1
shift
export NCCL_NVLS_ENABLE=0
concurrency=${CONCURRENCY:-1,8,32,128} limit=${LIMIT:-240} few=${FEW:-1,8}
one_shot=--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=true

# tests NAME FILE [ARGUMENTS...]
tests() {
    local name=$1 failed=0
    shift
    JAXSPEC_FIGURES=$out/$name.json timeout "$limit" python3 -m pytest -m gpu -s --durations=5 "$@" \
        >"$out/$name.log" 2>&1 || failed=$?
    grep -E '^(FAILED|E  )' "$out/$name.log" | cut -c1-300 | head -20
    echo "$name: $(grep -E ' (passed|failed|error|skipped)' "$out/$name.log" | tail -n 1)"
    [ "$failed" -eq 0 ] || status=$failed
    return "$failed"
}

# each FILE [ARGUMENTS...]: its tests at once, each in a process of its own, since nearly all that they do is compile
each() {
    local found one running=()
    mapfile -t found < <(python3 -m pytest -m gpu --collect-only "$@" 2>/dev/null | grep ::)
    [ ${#found[@]} -gt 0 ] || { echo "no tests in $1"; status=1; }
    for one in "${!found[@]}"; do
        XLA_PYTHON_CLIENT_PREALLOCATE=false tests "texts-$one" "${found[$one]}" &
        running+=($!)
    done
    for one in "${running[@]}"; do wait "$one" || status=1; done
}

# bench NAME ARGUMENTS...
bench() {
    local name=$1
    shift
    echo "== $name"
    timeout "$limit" python3 -m jaxspec.bench "$@" --json "$out/$name.json" 2>"$out/$name.log" ||
        { status=1; tail -n 5 "$out/$name.log"; }
}

# plan NAME MODEL [ARGUMENTS...]: what is predicted of it
plan() {
    local name=$1 model=$2
    shift 2
    [ -n "$model" ] || return 0
    JAX_PLATFORMS=cpu bench "plan-$name" plan --model "$model" --gpus "$n" --gpu "${GPU:-h100}" --sums one-shot \
        --context 1152 --context-length 2048 "$@"
}

# both NAME MODEL [ARGUMENTS...]: over N GPUs and on one
both() {
    local name=$1 model=$2
    shift 2
    [ -n "$model" ] || { echo "== $name: no model is named"; return 0; }
    local of=(decode --model "$model" --concurrency "$concurrency" --back-to-back --skip-warmup "$@" ${FLAGS-})
    bench "$name-tp$n" "${of[@]}" --tp-size "$n"
    [ -n "${ALONE-1}" ] && bench "$name-tp1" "${of[@]}"
}

# train M: an EAGLE-3 drafter over M GPUs, on texts that nobody wrote
train() {
    local name=train-$1 rows=$((${ROWS:-16} * $1)) devices
    devices=$(cut -d, -f "1-$1" <<<"${CUDA_VISIBLE_DEVICES:-0,1,2,3,4,5,6,7}")
    rm -rf "$out/$name"
    python3 - "$out/texts.jsonl" <<'END'
import json, random, sys
with open(sys.argv[1], "w") as file:
    for _ in range(4096):
        tokens = [random.randrange(3, 250) for _ in range(1024)]
        file.write(json.dumps({"tokens": tokens, "answers": [[100, 1024]]}) + "\n")
END
    echo "== $name"
    CUDA_VISIBLE_DEVICES=$devices JAX_NUM_CPU_DEVICES=$1 timeout "$limit" \
        python3 -m jaxspec.train eagle3 --model "${TARGET:-smollm2-135m-instruct}" --data "$out/texts.jsonl" \
        --output "$out/$name" --steps "${STEPS:-60}" --batch-size "$rows" --warm-up 5 --no-evaluation --no-plots \
        2>"$out/$name.log" || { status=1; tail -n 5 "$out/$name.log"; }
    tail -n 2 "$out/$name/metrics.jsonl" | cut -c1-300
}

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv 2>/dev/null
for part in "${@:-plan kernels sums texts servers local kept dense mixture hybrid large train}"; do
    for part in $part; do
        case $part in
            plan)
                plan dense "${QWEN-}"
                [ -n "${EAGLE3-}" ] && plan dense-eagle3 "${QWEN-}" --draft "eagle3:$EAGLE3"
                plan mixture "${QWEN_MOE-}"
                plan hybrid "${QWEN_HYBRID-}"
                plan hybrid-mtp "${QWEN_HYBRID-}" --draft mtp
                plan large "${LARGE-}"
                plan large-fp8 "${LARGE-}" --quantization fp8
                plan next-fp8 "${NEXT-}" --quantization fp8
                plan largest-fp8 "${LARGEST-}" --quantization fp8
                plan largest-fp8-mtp "${LARGEST-}" --quantization fp8 --draft mtp ;;
            kernels) tests kernels tests/gpu/test_peer_sum.py ;;
            sums)
                bench sums sums --tp-size "$n"
                XLA_FLAGS="${XLA_FLAGS:-} $one_shot" bench sums-one-shot sums --tp-size "$n" --ways psum ;;
            texts) each tests/gpu/test_several_gpus.py ;;
            drafters) each tests/gpu/test_several_gpus.py -k "each_drafter or deterministic" ;;
            servers) # several processes share each GPU's memory
                XLA_PYTHON_CLIENT_PREALLOCATE=false tests servers tests/gpu/test_several_servers.py ;;
            local) CUDA_VISIBLE_DEVICES=$(cut -d, -f 1 <<<"${CUDA_VISIBLE_DEVICES:-0}") bench local kernels --only over --no-plain --profile ;;
            kept) # the second of two starts finds what the first compiled
                for name in cold warm; do
                    JAXSPEC_CACHE=$out/cache bench "kept-$name" decode --model "$QWEN" --concurrency 1 --output-len 32 \
                        --max-running-requests 8 --skip-warmup --tp-size "$n" ${FLAGS-}
                done
                python3 - "$out" <<'END'
import json, sys
starts = [json.load(open(f"{sys.argv[1]}/kept-{name}.json"))["facts"]["ready_s"] for name in ("cold", "warm")]
print("ready in {:.1f} s, then in {:.1f} s".format(*starts))
END
                rm -rf "$out/cache" ;;
            dense)
                both dense "${QWEN-}"
                [ -n "${EAGLE3-}" ] && both dense-eagle3 "${QWEN-}" --draft "eagle3:$EAGLE3" --accept-rates 0.75,0.5,0.25 ;;
            mixture) both mixture "${QWEN_MOE-}" ;;
            hybrid)
                both hybrid "${QWEN_HYBRID-}"
                both hybrid-mtp "${QWEN_HYBRID-}" --draft mtp --accept-rates 0.75,0.5,0.25 ;;
            large) # none but Llama in FP8 fits one GPU
                ALONE='' concurrency=$few both large "${LARGE-}" --max-running-requests 8
                both large-fp8 "${LARGE-}" --quantization fp8
                ALONE='' both next-fp8 "${NEXT-}" --quantization fp8
                case ${GPU:-h100} in h200) ALONE='' both next "${NEXT-}" ;; esac
                ALONE='' both largest-fp8 "${LARGEST-}" --quantization fp8
                ALONE='' both largest-fp8-mtp "${LARGEST-}" --quantization fp8 --draft mtp \
                    --accept-rates 0.75,0.5,0.25 ;;
            train) train "$n"; train 1 ;;
            *) echo "no part $part" >&2; exit 2 ;;
        esac
    done
done
exit $status
