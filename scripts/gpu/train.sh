#!/usr/bin/env bash
# Make the drafters of the demo model, on a machine with H200s (four made the DFlash that ships) that has Python, jax
# with CUDA, flax, transformers, optax, orbax-checkpoint and matplotlib, but not this project installed. From the
# repository's root:
#
#     scripts/gpu/train.sh OUT [PART...]
#
# PART is of: data eagle3 dflash dspark evaluate; all by default, in that order. Each can be run again to go on where
# it was ended, and ends by itself after LIMIT seconds (570) with status 124. All GPUs present write texts, each its
# share, and all of them share each batch of a training. PROMPTS, a file that scripts/training_prompts.py made, is
# answered, SAMPLES (16384) conversations of the model's own are added, and MINUTES (5) spent on each drafter, without
# compiling. OUT receives texts.jsonl, and in eagle3/, dflash/ and dspark/ the drafter, its checkpoints, metrics.jsonl,
# run.json, acceptance.json and the charts. SMOLLM2 is the demo model's GGUF file; for evaluate, SPECBENCH is
# Spec-Bench's question.jsonl and GSM8K the test.jsonl of that. RATE is the learning rate (2e-3), RANK DSpark's (8),
# FLAGS are added to a training's. DSpark begins as INIT, the DFlash drafter that ships, and its two heads are trained.
# Needed as well, as wheels on PYTHONPATH where they aren't installed: gguf, and what optax and orbax-checkpoint need.
. "$(dirname "$0")/common.sh"
IFS=, read -ra devices <<<"${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)}"
gpus=${#devices[@]}

# run NAME ARGUMENTS...: one command of the trainer; progress goes to NAME.log
run() {
    local name=$1
    shift
    echo "== $name"
    timeout "${LIMIT:-570}" python3 -m jaxspec.train "$@" 2>>"$out/$name.log" ||
        { status=$?; tail -c 2000 "$out/$name.log" | tr '\r' '\n' | tail -n 5; return $status; }
}

# write I: the texts of GPU I, answers to its share of the prompts and then conversations of the model's own
write() {
    local i=$1 share=$out/texts-$1
    export CUDA_VISIBLE_DEVICES=${devices[i]}
    mkdir -p "$share"
    split -n "r/$((i + 1))/$gpus" "$PROMPTS" >"$share/prompts.jsonl"
    texts=(--model "$SMOLLM2" --row-length 1536 --temperature 0,0,0,0.8 --max-answer-tokens 300)
    run "prompted-$i" data "${texts[@]}" --data "$share/prompts.jsonl" --seed "$((10 + i))" --output "$share/prompted"
    run "own-$i" data "${texts[@]}" --data self --num-samples "$((${SAMPLES:-16384} / gpus))" --seed "$i" \
        --output "$share/own"
    return $status
}

# evaluate NAME DRAFTER FLAGS...: tokens a round on Spec-Bench and GSM8K, by category, beside others on other GPUs
evaluate() {
    local name=$1 draft=${2%%/*}:$out/$2
    shift 2
    [ -e "${draft#*:}/model.safetensors" ] || { echo "== evaluate-$name: left out, there is no ${draft#*:}"; return; }
    CUDA_VISIBLE_DEVICES=${devices[${#started[@]}]} run "evaluate-$name" evaluate --model "$SMOLLM2" \
        --draft "$draft" --data "$SPECBENCH" "$GSM8K" --prompts 80 --max-new-tokens 256 --dtype bfloat16 \
        --context-length 2048 --max-running-requests 128 --skip-warmup --few-programs \
        --output "$out/evaluate-$name" "$@" >"$out/evaluate-$name.md" &
    started+=($!)
    [ ${#started[@]} -lt "$gpus" ] || finish
}

# finish: wait for what was started
finish() {
    for each in "${started[@]}"; do wait "$each" || status=$?; done
    started=()
}

drafter=(--model "$SMOLLM2" --data "$out/texts.jsonl" --row-length 1536 --minutes "${MINUTES:-5}" \
    --learning-rate "${RATE:-2e-3}")
read -ra more <<<"${FLAGS:-}"
started=()
for part in "${@:-data eagle3 dflash dspark evaluate}"; do
    for part in $part; do
        case $part in
            data)
                for i in "${!devices[@]}"; do
                    write "$i" &
                    started+=($!)
                done
                finish
                [ $status = 0 ] && cat "$out"/texts-*/{prompted,own}/data.jsonl >"$out/texts.jsonl" ;;
            eagle3) run eagle3 eagle3 "${drafter[@]}" --output "$out/eagle3" --batch-size "$((6 * gpus))" --mlp-size 2048 \
                --unroll 4 "${more[@]}" ;;
            dflash) run dflash dflash "${drafter[@]}" --output "$out/dflash" --batch-size "$((10 * gpus))" --num-layers 5 \
                --num-heads 6 --num-kv-heads 3 --mlp-size 192 --target-layers 1,14,27 --block-size 8 --gamma 3 \
                "${more[@]}" ;;
            dspark) run dspark dspark "${drafter[@]}" --output "$out/dspark" --batch-size "$((10 * gpus))" --gamma 3 \
                --init "${INIT:-jaxspec/drafters/shipped/smollm2-135m-instruct-dflash}" --markov-rank "${RANK:-8}" \
                --heads-only --weigh-rounds "${more[@]}" ;;
            evaluate)
                evaluate eagle3-3 eagle3/drafter --num-draft-tokens 3
                evaluate eagle3-5 eagle3/drafter --num-draft-tokens 5
                evaluate eagle3-tree eagle3/drafter --topk 4 --num-steps 5 --num-draft-tokens 16
                evaluate dflash dflash/drafter
                evaluate dspark dspark/drafter
                finish
                cat "$out"/evaluate-*.md ;;
            *) echo "no part $part" >&2; exit 2 ;;
        esac
    done
done
exit $status
