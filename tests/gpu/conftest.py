"""GPU tests need neither server nor network. Figures they take go to $JAXSPEC_FIGURES, a JSON file, and to stdout.

pytest-xdist's processes have one GPU each: number n takes GPU n modulo the number of GPUs. So tests of several GPUs run
without pytest-xdist only.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest


def visible() -> list[str]:
    """The GPUs that CUDA shows this process, by the names it takes in CUDA_VISIBLE_DEVICES."""
    if listed := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return listed.split(",")
    told = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True).stdout
    return [str(index) for index in range(len(told.splitlines()))]


if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and os.environ["JAX_PLATFORMS"] != "cpu":
    gpus = visible()  # jax reads the choice when it is first asked for devices, which is later
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker.removeprefix("gw")) % len(gpus)]


@pytest.fixture(scope="session")
def figures():
    """A dict for what was measured, written when the session ends, whatever failed."""
    taken = {}
    yield taken
    text = json.dumps(taken, indent=1)
    print(f"\nfigures: {text}")
    if taken and (path := os.environ.get("JAXSPEC_FIGURES")):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        Path(path).with_suffix(f".{worker}.json" if worker else ".json").write_text(text + "\n")
