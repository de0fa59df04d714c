#!/usr/bin/env bash
# The CPU tests on all cores, and beside them the GPU tests of rounds and kernels, on a machine that has Python, jax with
# CUDA, flax, transformers and pytest, but not this project installed. From the repository's root:
#
#     scripts/gpu/everything.sh OUT
#
# OUT receives cpu.log, a log for each GPU test file, and device.txt. TESTS names GPU test files ("none" for no such),
# LIMIT is the seconds for either part (400). Needed as wheels on PYTHONPATH where they aren't installed: what
# `pip install -e '.[dev]'` would bring. Tests of the demo model fail where it can't be downloaded.
. "$(dirname "$0")/common.sh"
[ $# = 0 ] || usage
limit=${LIMIT:-400}
JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES='' timeout "$limit" python3 -m pytest -n "$(($(nproc) - 3))" --dist loadfile \
    --no-loadscope-reorder --max-worker-restart 0 >"$out/cpu.log" 2>&1 &
if [ "${TESTS:-}" != none ]; then
    LIMIT=$limit TESTS=${TESTS:-lossless trees hybrid qwen3_8b} scripts/gpu/smoke.sh "$out"
fi
wait
grep -E '^(FAILED|ERROR)' "$out/cpu.log" | cut -c1-220
tail -n 1 "$out/cpu.log"
