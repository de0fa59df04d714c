#!/usr/bin/env bash
# Weights of four bits on one Hopper GPU: the kernels against numpy and their speed beside FP8's, with candidates of
# sizes; then rounds of Qwen3-8B's shapes at 1, 8, 32 and 128 requests with made-up weights in each format. From the
# repository's root:
#
#     scripts/gpu/four_bits.sh OUT [PART...]
#
# PART is of: kernels many bf16 fp8 int4 nvfp4; by default kernels fp8 int4 nvfp4, in that order. OUT receives for each a log
# and JSON. CONCURRENCY replaces the numbers of requests. With jax and CUDA installed, but not this project.
. "$(dirname "$0")/common.sh"

# decode NAME CONFIG OPTION...: rounds of Qwen3-8B's shapes; CONFIG is added to its config.json
decode() {
    mkdir -p "$out/$1"
    cat >"$out/$1/config.json" <<JSON
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096,
 "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
 "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000, "rms_norm_eps": 1e-6,
 "torch_dtype": "bfloat16"$2}
JSON
    timeout "${LIMIT:-120}" python3 -m jaxspec.bench decode --model "$out/$1" --concurrency "${CONCURRENCY:-1,8,32,128}" \
        --prompt-len 512 --output-len 64 --max-running-requests 128 --context-length 1024 --skip-warmup \
        --json "$out/$1.json" "${@:3}" 2>"$out/$1.log" ||
        { status=1; tail -n 5 "$out/$1.log"; }
}

nvfp4=', "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}'
for part in "${@:-kernels fp8 int4 nvfp4}"; do
    for part in $part; do
        echo "== $part"
        case $part in
            kernels | many)
                [ $part = many ] && more=--many || more=
                timeout "${LIMIT:-240}" python3 -m scripts.gpu.four_bits $more >"$out/$part.log" 2>&1 || status=$?
                grep -v '^WARNING\|^[WIE][0-9]' "$out/$part.log" | cut -c1-400 | tail -n 100 ;;
            bf16) decode bf16 "" ;;
            fp8 | int4) decode "$part" "" --quantization "$part" ;;
            nvfp4) decode nvfp4 "$nvfp4" ;;
            *) echo "no part $part" >&2; exit 2 ;;
        esac
    done
done
exit $status
