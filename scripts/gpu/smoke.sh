#!/usr/bin/env bash
# The GPU tests and the host benchmark on a machine that has Python, jax with CUDA, flax, transformers and pytest, but
# not this project installed. From the repository's root:
#
#     scripts/gpu/smoke.sh OUT
#
# OUT receives device.txt, host.json, and for each test file a log, junit.xml and figures; TESTS names some of them only,
# LIMIT is a file's seconds (240). Needed as well, as wheels on PYTHONPATH where it isn't installed: gguf. The demo
# model's GGUF file is $JAXSPEC_TEST_GGUF (else it is downloaded). Ends with the last failing file's status, or 0.
. "$(dirname "$0")/common.sh"
[ $# = 0 ] || usage

{
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv
    nproc
    python3 -c 'import sys, jax, numpy; print(sys.version, "jax", jax.__version__, "numpy", numpy.__version__, jax.devices())'
} >"$out/device.txt" 2>&1
cat "$out/device.txt"

# Kernels first, then fewest compilations: what fails later leaves these results. A process each, since a kernel that
# reads out of bounds fails all that its process does afterwards.
kernels="expert_few expert_plan expert_stream top_experts expert_rows gated_delta conv_step conv_chunk weight_stream"
kernels+=" fp8_stream few_rows tile_matmul kv_write write_heads decode_attention prompt_attention"
for name in ${TESTS:-$kernels trees hybrid qwen3_8b smollm2 lossless}; do
    JAXSPEC_FIGURES=$out/$name.json timeout "${LIMIT:-240}" python3 -m pytest -m gpu -s --durations=0 \
        --junitxml="$out/$name.xml" "tests/gpu/test_$name.py" >"$out/$name.log" 2>&1 || status=$?
    grep -E '^(FAILED|E  )' "$out/$name.log" | cut -c1-300 | head -20
    echo "$name: $(tail -n 1 "$out/$name.log")"
done
timeout 60 python3 -m jaxspec.bench host --rounds 500 --json "$out/host.json"
exit "$status"
