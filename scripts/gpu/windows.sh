#!/usr/bin/env bash
# What a window costs and what all tokens do, on one Hopper GPU: decode and prompt attention at 1k, 8k and 32k tokens
# with windows of 128, 1024 and 4096, after the windowed kernels' own tests. From the repository's root:
#
#     scripts/gpu/windows.sh OUT
#
# OUT receives windows.json and windows.log. With jax and CUDA installed, but not this project.
. "$(dirname "$0")/common.sh"
[ $# = 0 ] || usage
set -e
python3 -m pytest -q -m gpu -k window tests/gpu/test_decode_attention.py tests/gpu/test_prompt_attention.py
python3 -m jaxspec.bench kernels --only attention --no-plain --json "$out/windows.json" 2>"$out/windows.log"
