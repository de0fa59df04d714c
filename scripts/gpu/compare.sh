#!/usr/bin/env bash
# The matched table of the demo model's drafters (`jaxspec train compare`), by all GPUs of a machine at once. From the
# repository's root:
#
#     scripts/gpu/compare.sh OUT [PART...]
#
# PART is of: texts train serve; all by default, in that order. On two H200s `texts train` takes LIMIT (270) seconds and
# `serve` four minutes, which may be a call of its own, on another machine: OUT/packed.tar.xz has what it needs, and is
# unpacked where OUT has no drafters. OUT must be the same path in both. On one H200 answers to 13,000 prompts take 90 s,
# and `train` 391 with BUDGET=0.9m and ROWS=8 (LIMIT=1500).
#
# texts: the model answers PROMPTS, a file that scripts/training_prompts.py made, each GPU its share. Meanwhile the
# training steps are compiled. train: each of DRAFTERS has a GPU for as long as is left for it, or BUDGET. serve: plain
# decoding and each drafter, 7 drafts a round, then those that ship, on QUESTIONS (78) of SPECBENCH and GSM8K. Engines
# compile beside each other, and are measured one after the other. OUT/compare.md is the table, shipped-*.txt the rest.
. "$(dirname "$0")/common.sh"
IFS=, read -ra devices <<<"${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)}"
gpus=${#devices[@]}
model=${SMOLLM2:-smollm2-135m-instruct}
small="num-heads=4&num-kv-heads=2&mlp-size=128"
block="$small&num-layers=2&target-layers=1,14,27&mask-token-id=4&gamma=3"
read -ra drafters <<<"${DRAFTERS:-eagle3?unroll=4&$small dflash?$block dflash2?$block&selector-rank=4 \
dspark?$block&markov-rank=4 domino?$block&gru-size=128&correction-rank=8 \
lilicorr?$block&network-size=128&network-heads=2&factor-size=64}"
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.15}
started=()

# on I NAME COMMAND...: a command in the background, on GPU I; its output goes to OUT/NAME.log
on() {
    local gpu=${devices[$1]} log=$out/${2//[^a-z0-9-]/-}.log
    shift 2
    CUDA_VISIBLE_DEVICES=$gpu timeout "$((${LIMIT:-270} - SECONDS))" "$@" >"$log" 2>&1 &
    started+=($!)
}

# finish: wait for what was started
finish() {
    for each in "${started[@]}"; do wait "$each" || status=$?; done
    started=()
}

# compare OUTPUT BUDGET TEXTS: the flags that all have
compare() {
    flags=(compare --model "$model" --output "$1" --budget "$2" --data "$3" --row-length "${LENGTH:-1024}"
        --batch-size "${ROWS:-4}" --learning-rate "${RATE:-3e-3}" --warm-up 60 --num-prompts "${QUESTIONS:-78}"
        --max-new-tokens "${TOKENS:-96}" --benchmark "Spec-Bench=$SPECBENCH" --benchmark "GSM8K=$GSM8K")
}

# packed IN OUT: a file of bfloat16 with the first bytes of all numbers, then the second, of which these can be compressed
packed() {
    python3 -c 'import sys; d = open(sys.argv[1], "rb").read(); open(sys.argv[2], "wb").write(d[::2] + d[1::2])' "$@"
}
unpacked() {
    python3 -c 'import sys
d = open(sys.argv[1], "rb").read(); out = bytearray(len(d)); half = (len(d) + 1) // 2
out[::2], out[1::2] = d[:half], d[half:]; open(sys.argv[2], "wb").write(out)' "$@"
}

for part in ${@:-texts train serve}; do
    case $part in
        texts)
            case $PROMPTS in *.gz) zcat "$PROMPTS" ;; *) cat "$PROMPTS" ;; esac >"$out/prompts.jsonl"
            for i in "${!devices[@]}"; do
                split -n "r/$((i + 1))/$gpus" "$out/prompts.jsonl" >"$out/prompts-$i.jsonl"
                on "$i" "texts-$i" python3 -m jaxspec.train data --model "$model" --data "$out/prompts-$i.jsonl" --seed "$i" \
                    --row-length "${LENGTH:-1024}" --temperature 0,0,0,0.8 --max-answer-tokens 200 --output "$out/texts-$i"
            done
            python3 -c 'import json
for i in range(40):
    print(json.dumps({"tokens": list(range(i + 5, i + 905)), "answers": [[100, 900]]}))' >"$out/few.jsonl"
            compare "$out/compiling" 0.02m "$out/few.jsonl"  # minutes, as below: a short run's steps are other programs
            for i in "${!drafters[@]}"; do
                on $((i % gpus)) "compiling-$i" python3 -m jaxspec.train "${flags[@]}" --drafters "${drafters[i]}" --no-plots --until trained
            done
            finish
            cat "$out"/texts-*/data.jsonl >"$out/texts.jsonl"
            echo "texts: $(wc -l <"$out/texts.jsonl") after $SECONDS s" ;;
        train)
            each=$(((${#drafters[@]} + gpus - 1) / gpus))
            left=$(python3 -c "print(round((((${LIMIT:-270} - 5 - $SECONDS - 15) / $each) - 9) / 60, 2))")m
            budget=${BUDGET:-$left}
            compare "$out" "$budget" "$out/texts.jsonl"
            echo "train: $budget each, from $SECONDS s on"
            for i in "${!drafters[@]}"; do
                on $((i % gpus)) "train-$i" python3 scripts/gpu/in_turn.py "$out/turn-$((i % gpus))" "${flags[@]}" \
                    --drafters "${drafters[i]}" --no-plots --until trained
            done
            finish
            rm -rf "$out/packing"
            for folder in "$out"/*/drafter; do
                to=$out/packing/$(basename "$(dirname "$folder")")
                [ -e "$folder/model.safetensors" ] && [ "${to##*/}" != compiling ] || continue
                mkdir -p "$to/drafter"
                cp "$folder"/../{run.json,metrics.jsonl} "$to/"
                cp "$folder/config.json" "$to/drafter/"
                packed "$folder/model.safetensors" "$to/drafter/packed"
            done
            echo "$budget" >"$out/packing/budget"
            tar -C "$out/packing" -c . | xz -T0 -3 >"$out/packed.tar.xz"
            echo "trained: $(ls "$out"/packing/*/drafter/packed | wc -l), $(du -h "$out/packed.tar.xz" | cut -f1) after $SECONDS s" ;;
        serve)
            if [ ! -e "$out/budget" ]; then
                tar -C "$out" -xJf "$out/packed.tar.xz" --exclude=./texts.jsonl
                for each in "$out"/*/drafter/packed; do unpacked "$each" "${each%/*}/model.safetensors"; done
            fi
            compare "$out" "$(<"$out/budget")" "$out/texts.jsonl"
            i=0
            for each in none "${drafters[@]}"; do
                on $((i % gpus)) "serve-$i" python3 scripts/gpu/in_turn.py "$out/turn-$((i % gpus))" "${flags[@]}" \
                    --drafters "$each" --no-plots --until served
                i=$((i + 1))
            done
            for each in ${SHIPPED-eagle3 dflash dspark}; do
                draft=$each:jaxspec/drafters/shipped/smollm2-135m-instruct-$each  # whatever the model's file is called
                on $((i % gpus)) "shipped-$each" python3 scripts/gpu/in_turn.py "$out/turn-$((i % gpus))" accept --draft "$draft" \
                    --model "$model" --data "Spec-Bench=$SPECBENCH" --data "GSM8K=$GSM8K" --no-plain --concurrency 1,8,32 \
                    --num-prompts "${QUESTIONS:-78}" --output-len "${TOKENS:-96}" --batch-sizes 1,8,32 \
                    --disable-structured-output --json "$out/shipped-$each.json"
                i=$((i + 1))
            done
            finish
            there=()
            for each in "${drafters[@]}"; do
                grep -qs made_of "$out/${each//[?&=:,\/]/-}/served.json" && there+=("$each")
            done
            python3 -c "import matplotlib" 2>/dev/null || flags+=(--no-plots)
            [ ${#there[@]} -gt 0 ] && python3 -m jaxspec.train "${flags[@]}" --drafters "$(IFS=,; echo "${there[*]}")"
            [ -z "${SHIPPED-x}" ] || tail -n 60 "$out"/shipped-*.log
            echo "served: ${#there[@]} of ${#drafters[@]} after $SECONDS s" ;;
        *) echo "no part $part" >&2; exit 2 ;;
    esac
done
exit $status
