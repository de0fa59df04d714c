#!/usr/bin/env bash
# MXFP4 experts on one Hopper GPU: their kernels against plain jnp, their speed, then rounds of gpt-oss' shapes at 1, 8
# and 32 requests with made-up weights. From the repository's root:
#
#     scripts/gpu/mxfp4.sh OUT [PART...]
#
# PART is of: kernels 20b 120b; all by default, in that order. OUT receives for each a log and JSON. 120b needs 80 GB.
# With jax and CUDA installed, but not this project.
. "$(dirname "$0")/common.sh"

# decode NAME LAYERS EXPERTS: rounds of a model of these sizes; the rest is gpt-oss' default
decode() {
    mkdir -p "$out/$1"
    cat >"$out/$1/config.json" <<JSON
{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": $2, "num_local_experts": $3,
 "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}
JSON
    timeout "${LIMIT:-240}" python3 -m jaxspec.bench decode --model "$out/$1" --concurrency 1,8,32 --prompt-len 1024 \
        --output-len 128 --max-running-requests 32 --context-length 2048 --skip-warmup \
        --profile --json "$out/$1.json" 2>"$out/$1.log" ||
        { status=1; tail -n 5 "$out/$1.log"; }
}

for part in "${@:-kernels 20b 120b}"; do
    for part in $part; do
        echo "== $part"
        case $part in
            kernels) for name in expert_four expert_plan expert_rows; do
                JAXSPEC_FIGURES=$out/$name.json timeout "${LIMIT:-240}" python3 -m pytest -q -m gpu -s \
                    "tests/gpu/test_$name.py" >"$out/$name.log" 2>&1 || status=$?
                grep -E '^(FAILED|E  |gpt-oss)' "$out/$name.log" | cut -c1-400 | head -40
                echo "$name: $(tail -n 1 "$out/$name.log")"
            done ;;
            20b) decode 20b 24 32 ;;
            120b) decode 120b 36 128 ;;
            *) echo "no part $part" >&2; exit 2 ;;
        esac
    done
done
exit $status
