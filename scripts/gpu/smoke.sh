#!/usr/bin/env bash
# The GPU tests and the host benchmark on a machine that has Python, jax with CUDA, flax, transformers and pytest, but
# not this project installed. From the repository's root:
#
#     scripts/gpu/smoke.sh OUT
#
# OUT receives device.txt, host.json, and for the kernels' tests and for each other file a log, junit.xml and figures.
# JOBS processes share the kernels' tests (1; more need pytest-xdist, the GPUs to themselves, and 8 GiB of a GPU each);
# they spread over all GPUs. Tests of speed follow, by one process. TESTS names some files only. LIMIT is the seconds of a file (240), and of all kernels' forty
# times that over JOBS, but at least once. Needed as well, as wheels on PYTHONPATH where it isn't installed: gguf. The demo
# model's GGUF file is $JAXSPEC_TEST_GGUF (else it is downloaded). Ends with the last failing file's status, or 0.
. "$(dirname "$0")/common.sh"
[ $# = 0 ] || usage

{
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv
    nproc
    python3 -c 'import sys, jax, numpy; print(sys.version, "jax", jax.__version__, "numpy", numpy.__version__, jax.devices())'
} >"$out/device.txt" 2>&1
cat "$out/device.txt"

limit=${LIMIT:-240} jobs=${JOBS:-1}

# ask NAME SECONDS MARKS FILE...: pytest's tests with these marks, with NAME's log, figures and results
ask() {
    local name=$1 seconds=$2 marks=$3
    shift 3
    JAXSPEC_FIGURES=$out/$name.json timeout "$seconds" python3 -m pytest -m "$marks" -s --durations=0 \
        --junitxml="$out/$name.xml" "$@" >"$out/$name.log" 2>&1 || status=$?
    grep -E '^(FAILED|E  )' "$out/$name.log" | cut -c1-300 | head -20
    echo "$name: $(tail -n 1 "$out/$name.log")"
}

# Kernels first: what fails later leaves these results. What serves a model has a process for each file, since a kernel
# that reads out of bounds fails all that its process does afterwards. Tests of several GPUs skip themselves on one.
models="trees hybrid deterministic deterministic_hybrid qwen3_8b smollm2 lossless peer_sum several_gpus several_servers"
if [ -z "${TESTS:-}" ]; then
    kernels=()
    for file in tests/gpu/test_*.py; do
        name=$(basename "$file" .py)
        [[ " $models " == *" ${name#test_} "* ]] || kernels+=("$file")
    done
    share=()
    [ "$jobs" = 1 ] || share=(-vv -n "$jobs" --dist worksteal) # -vv: also a run that is cut off names what failed
    seconds=$((limit * (jobs < 40 ? 40 : jobs) / jobs))
    (
        # XLA needn't try which of its matmuls is fastest: these only make what kernels are compared with.
        export XLA_FLAGS="--xla_gpu_autotune_level=0 ${XLA_FLAGS:-}" XLA_PYTHON_CLIENT_PREALLOCATE=false
        ask kernels "$seconds" "gpu and not speed" "${share[@]}" "${kernels[@]}"
        exit "$status"
    ) || status=$?
    ask speed "$limit" "gpu and speed" "${kernels[@]}"
fi
for name in ${TESTS:-$models}; do
    ask "$name" "$limit" gpu "tests/gpu/test_$name.py"
done
timeout 60 python3 -m jaxspec.bench host --rounds 500 --json "$out/host.json"
exit "$status"
