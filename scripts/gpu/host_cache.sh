#!/usr/bin/env bash
# The host cache on one Hopper GPU, with weights made up: reloads, and conversations whose KV is four times the pool's.
# From the repository's root, with jax and CUDA installed, but not this project:
#
#     scripts/gpu/host_cache.sh OUT [PART...]
#
# PART is of: reload disk conversations hybrid; the first three by default. `reload` brings 8,192 tokens of Qwen3-8B
# back; `disk` 4,096 from files. `conversations` has 64 of 8 turns with EAGLE-3, with the cache and without: both engines
# start side by side and are timed one after the other. `hybrid` is the same with MTP on 16 layers of Qwen3.8-27B. OUT
# receives tables and logs.
. "$(dirname "$0")/common.sh"
python3 scripts/configs.py "$out/models" || exit

# conversations NAME MODEL DRAFT HOST TOKENS ARGUMENTS...: HOST GiB of the host's memory, TOKENS in the pool
conversations() {
    local name=$1 model=$2 draft=$3 host=$4 tokens=$5
    shift 5
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.46 timeout "${LIMIT:-240}" python3 scripts/gpu/in_turn.py "$out/lock" serve \
        --via offline --model "$out/models/$model" --load-format dummy --disable-structured-output --draft "$draft" \
        --draft-policy fixed --few-programs --dataset conversations --prefixes 64 --turns 8 --prefix-len 0 \
        --prompt-len 512 --output-len 64 --num-prompts 512 --concurrency 32 --context-length 8192 \
        --max-total-tokens "$tokens" ${host:+--host-kv-gb "$host"} "$@" --json "$out/$name.json" >"$out/$name.txt" \
        2>"$out/$name.log"
    local ended=$?
    echo "== $name"
    [ $ended = 0 ] && cat "$out/$name.txt" || { tail -n 5 "$out/$name.log"; return $ended; }
}

for part in ${@:-reload disk conversations}; do
    case $part in
    reload | disk)
        of=("$out/models/qwen3-8b")
        [ "$part" = disk ] && of+=(--tokens 4096 --pool 10240 --host-kv-gb 1.2 --disk-kv-gb 8 --disk-kv-path "$out/kv")
        timeout "${LIMIT:-240}" python3 -m scripts.gpu.host_cache "${of[@]}" >"$out/$part.txt" \
            2>"$out/$part.log" && cat "$out/$part.txt" || { tail -n 5 "$out/$part.log"; status=1; }
        rm -rf "$out/kv"
        ;;
    conversations | hybrid)
        of=(qwen3-8b "eagle3:$out/models/qwen3-8b-eagle3")
        [ "$part" = hybrid ] && of=(qwen3.8-27b-16 mtp)
        conversations "$part-without" "${of[@]}" "" 65536 & first=$!
        conversations "$part-with" "${of[@]}" 44 65536 & second=$!
        wait $first || status=1
        wait $second || status=1
        ;;
    *) usage ;;
    esac
done
exit $status
