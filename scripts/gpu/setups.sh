#!/usr/bin/env bash
# The set-ups of SGLang's pull requests on speculative decoding, over N GPUs of a host, as one table: published, vLLM's
# on the same machine kind, jaxspec's. On a machine that has Python and jax with CUDA, but not this project installed.
# From the repository's root:
#
#     scripts/gpu/setups.sh OUT N [PART...]
#
# PART is of the following, each shorter than four minutes; by default those that N GPUs can have, in this order.
#   start             seconds from a start to the first token and to all programs: Qwen3-8B, and 35B-A3B with MTP
#   mtp               #22128: Qwen3.5-35B-A3B in FP8 with MTP at 1 and 5 requests a second
#   mtp-overlap       its rounds with overlap on and off
#   dflash            #20547: Qwen3-8B with DFlash at 1 and 32 requests, overlap on and off
#   none one tree-4 tree-2  naive EAGLE's: Llama-2-70B, 500 requests of 717 to 1,024 tokens each way; trees are (steps,
#                     top-k, tokens with the root): (2,4,4) and (1,2,2)
#   one-overlap tree-4-overlap tree-2-overlap  their rounds with overlap on and off
#   dense-load hybrid-load  Qwen3-8B and 35B-A3B in FP8 with MTP under a load of 256 requests, as vLLM was timed
#   next-few next-many, and the same with -off  #15591: Qwen3-Next-80B with MTP at 1 to 16 and 32 to 128 requests,
#                     -off without overlap (four GPUs)
#   next-prefix       its shared prefixes, 10 requests a second (four GPUs)
#   largest           #18906: Qwen3.5-397B-A17B in FP8 with MTP, one stream, overlap on and off (four GPUs)
#   large-rounds large-load next-rounds next-load  Llama-3.3-70B in FP8, and Qwen3-Next-80B with MTP: rounds at 1, 8, 32
#                     and 128 requests with overlap on and off, and a load of 256, as vLLM was timed (four GPUs)
#   next-plain largest-rounds  such rounds of Qwen3-Next-80B without drafts, and of 397B in FP8 with MTP (four GPUs)
#   table             the table again, of what OUT has
# PART+PART are one process, which loads the weights that they share once. With SHARE, the share of the GPUs' memory that
# each has, processes start at once, and are timed one after the other: what takes long is to compile.
# OUT receives a log and a JSON file for each, and setups.md. QWEN, DFLASH, HYBRID, LLAMA2, EAGLE, LARGE, NEXT and
# LARGEST are folders with the config.json of Qwen3-8B, its DFlash drafter, Qwen3.5-35B-A3B, Llama-2-70B, its EAGLE
# drafter, Llama-3.3-70B, Qwen3-Next-80B and Qwen3.5-397B-A17B (`scripts/configs.py` writes all of them). Weights are
# made up. Acceptance is imposed: the published length, or what vLLM had, 0.75, 0.5 and 0.25. A part whose model isn't
# named is left out. FLAGS are more of the benchmarks', LOAD of `bench load` alone, DECODE of `bench decode`; LIMIT is the
# seconds of a process (240). Most of the table in two calls of under two minutes each (compiling included), of fewer
# requests, which the table counts:
#
#     SHARE=0.3 LOAD="--num-prompts 16" DECODE="--concurrency 1,32" scripts/gpu/setups.sh OUT 2 mtp mtp-overlap dflash
#     LOAD="--num-prompts 64 --concurrency 64" scripts/gpu/setups.sh OUT 2 none+one tree-4+tree-2
#
# On virtual CPU devices it rehearses every part with tiny models (`scripts/configs.py --small`):
#
#     JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 QWEN=... LOAD="--num-prompts 4" FLAGS="--few-programs --context-length 4096 \
#         --max-total-tokens 16384 --prompt-len 16 --output-len 48 --concurrency 2" scripts/gpu/setups.sh OUT 4
. "$(dirname "$0")/common.sh"
[ $# -ge 1 ] || usage
n=$1
shift
export NCCL_NVLS_ENABLE=0

# run PART COMMAND MODEL ARGUMENTS...: one more benchmark for `process`
run() {
    local part=$1 command=$2 model=$3
    shift 3
    [ -n "$model" ] || { echo "== $part: no model is named"; return 0; }
    case $command in decode) set -- "$@" ${DECODE-} ;; *) set -- "$@" ${LOAD-} ;; esac
    [ ${#joined[@]} -eq 0 ] || joined+=(--)
    joined+=("$command" --model "$model" --tp-size "$n" --skip-warmup "$@" ${FLAGS-} --json "$out/$part.json")
}

# process NAME ARGUMENTS...
process() {
    local name=$1
    shift
    echo "== $name"
    timeout "${LIMIT:-240}" python3 scripts/gpu/in_turn.py "$out/lock" "$@" 2>"$out/$name.log" ||
        { tail -n 5 "$out/$name.log"; return 1; }
}

# times COUNT RATE: the rate so many times, as --accept-rates takes it
times() { printf "$2%.0s," $(seq "$1") | sed 's/,$//'; }

mtp=(--draft mtp --num-draft-tokens 3)
lengths=(--num-prompts 500 --prompt-len 717-1024 --output-len 717-1024 --concurrency 128)
eagle=(--draft "eagle:${EAGLE-}")
one=("${eagle[@]}" --num-draft-tokens 1 --accept-rates 0.7)
tree4=("${eagle[@]}" --num-steps 2 --topk 4 --num-draft-tokens 3 --accept-rates 0.7,0.6)
tree2=("${eagle[@]}" --num-steps 1 --topk 2 --num-draft-tokens 1 --accept-rates 0.7)
both=(--overlap both --back-to-back --concurrency 1,8,32,128)
next=("${mtp[@]}" --accept-rates "$(times 3 0.665)")
sweep=("${next[@]}" --prompt-len 1024 --output-len 1024)
as_vllm=("${mtp[@]}" --accept-rates 0.75,0.5,0.25)
load=(--concurrency 256 --num-prompts 512 --prompt-len 1024 --output-len 256)
[ -n "${EAGLE-}" ] || unset LLAMA2

parts=(start mtp mtp-overlap dflash none one tree-4 tree-2 one-overlap tree-4-overlap tree-2-overlap)
parts+=(dense-load hybrid-load)
[ "$n" -lt 4 ] || parts+=(next-few next-many next-few-off next-many-off next-prefix largest)
[ "$n" -lt 4 ] || parts+=(large-rounds large-load next-rounds next-load next-plain largest-rounds)
[ $# -gt 0 ] || set -- "${parts[@]}"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv 2>/dev/null
[ -z "${SHARE-}" ] || export XLA_PYTHON_CLIENT_MEM_FRACTION=$SHARE
running=()
for named; do
    joined=()
    for part in ${named//+/ }; do case $part in
        start)
            started=()
            [ -z "${QWEN-}" ] || started+=(plain)
            [ -z "${HYBRID-}" ] || started+=(mtp)
            FLAGS="--tp-size $n" scripts/gpu/start.sh "$out/start" "${started[@]}" || status=1 ;;
        mtp)
            run mtp load "${HYBRID-}" --quantization fp8 "${mtp[@]}" --accept-rates "$(times 3 0.905)" \
                --concurrency 8 --request-rate 1,5 --num-prompts 64 --prompt-len 1024 --output-len 512 ;;
        mtp-overlap)
            run mtp-overlap decode "${HYBRID-}" --quantization fp8 "${mtp[@]}" --accept-rates "$(times 3 0.905)" \
                "${both[@]}" ;;
        dflash)
            run dflash decode "${DFLASH:+${QWEN-}}" --draft "dflash:${DFLASH-}" --accept-rates "$(times 15 0.859)" \
                "${both[@]}" --concurrency 1,32 --prompt-len 128 --output-len 1024 ;;
        none) run none load "${LLAMA2-}" "${lengths[@]}" ;;
        one) run one load "${LLAMA2-}" "${lengths[@]}" "${one[@]}" ;;
        tree-4) run tree-4 load "${LLAMA2-}" "${lengths[@]}" "${tree4[@]}" ;;
        tree-2) run tree-2 load "${LLAMA2-}" "${lengths[@]}" "${tree2[@]}" ;;
        one-overlap) run one-overlap decode "${LLAMA2-}" "${both[@]}" "${one[@]}" ;;
        tree-4-overlap) run tree-4-overlap decode "${LLAMA2-}" "${both[@]}" "${tree4[@]}" ;;
        tree-2-overlap) run tree-2-overlap decode "${LLAMA2-}" "${both[@]}" "${tree2[@]}" ;;
        next-few) run next-few load "${NEXT-}" "${sweep[@]}" --concurrency 1,2,4,8,16 ;;
        next-many) run next-many load "${NEXT-}" "${sweep[@]}" --concurrency 32,64,128 ;;
        next-few-off) run next-few-off load "${NEXT-}" "${sweep[@]}" --concurrency 1,8 --disable-overlap ;;
        next-many-off) run next-many-off load "${NEXT-}" "${sweep[@]}" --concurrency 32,128 --disable-overlap ;;
        next-prefix)
            run next-prefix load "${NEXT-}" "${next[@]}" --dataset shared-prefix --prefixes 32 --prefix-len 2048 \
                --prompt-len 128 --output-len 256 --num-prompts 512 --concurrency 128 --request-rate 10 ;;
        largest)
            run largest decode "${LARGEST-}" --quantization fp8 "${mtp[@]}" --accept-rates "$(times 3 0.887)" \
                "${both[@]}" --concurrency 1 ;;
        dense-load) run dense-load load "${QWEN-}" "${load[@]}" ;;
        hybrid-load) run hybrid-load load "${HYBRID-}" --quantization fp8 "${as_vllm[@]}" "${load[@]}" ;;
        large-rounds) run large-rounds decode "${LARGE-}" --quantization fp8 "${both[@]}" ;;
        large-load) run large-load load "${LARGE-}" --quantization fp8 "${load[@]}" ;;
        next-rounds) run next-rounds decode "${NEXT-}" "${as_vllm[@]}" "${both[@]}" ;;
        next-plain) run next-plain decode "${NEXT-}" "${both[@]}" ;;
        largest-rounds) run largest-rounds decode "${LARGEST-}" --quantization fp8 "${as_vllm[@]}" "${both[@]}" ;;
        next-load) run next-load load "${NEXT-}" "${as_vllm[@]}" "${load[@]}" ;;
        table) ;;
        *) echo "no part $part" >&2; exit 2 ;;
    esac; done
    [ ${#joined[@]} -gt 0 ] || continue
    process "$named" "${joined[@]}" &
    [ -n "${SHARE-}" ] || wait $! || status=1
    running+=($!)
done
for each in ${SHARE:+"${running[@]}"}; do wait "$each" || status=1; done
rm -f "$out/lock"
python3 scripts/setups_table.py "$out" | tee "$out/setups.md"
exit $status
