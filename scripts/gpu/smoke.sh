#!/usr/bin/env bash
# The GPU tests and the host benchmark on a machine that has Python, jax with CUDA, flax, transformers and pytest, but
# not this project installed. From the repository's root:
#
#     scripts/gpu/smoke.sh OUT
#
# OUT receives device.txt, log.txt, junit.xml, figures.json and host.json. Needed as well, as wheels on PYTHONPATH
# where it isn't installed: gguf. The demo model's GGUF file is $JAXSPEC_TEST_GGUF (else it is downloaded). Ends within
# ten minutes, with pytest's exit status.
set -uo pipefail
cd "$(dirname "$0")/../.."
[ $# = 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 JAXSPEC_FIGURES=$out/figures.json
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu}

{
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv
    nproc
    python3 -c 'import sys, jax, numpy; print(sys.version, "jax", jax.__version__, "numpy", numpy.__version__, jax.devices())'
} >"$out/device.txt" 2>&1
cat "$out/device.txt"

# Kernels first, then fewest compilations: what fails later leaves these results.
timeout 520 python3 -m pytest -m gpu -s --durations=0 --junitxml="$out/junit.xml" \
    tests/gpu/test_weight_stream.py tests/gpu/test_decode_attention.py tests/gpu/test_prompt_attention.py \
    tests/gpu/test_qwen3_8b.py tests/gpu/test_smollm2.py tests/gpu/test_lossless.py 2>&1 | tee "$out/log.txt"
status=${PIPESTATUS[0]}
timeout 60 python3 -m jaxspec.bench host --rounds 500 --json "$out/host.json" 2>&1 | tee -a "$out/log.txt"
exit "$status"
