"""Two demo replicas behind a router, and on Ray Serve, as people start them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {"sglang-router": "sglang-router", "vllm-router": "vllm-router", "ray": "serve"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_killed_replica_loses_no_request_that_is_sent_again(kind):
    place = os.pathsep.join((os.environ.get("JAXSPEC_ROUTERS", ""), str(Path(sys.executable).parent)))
    program = shutil.which(PROGRAMS[kind], path=place) or shutil.which(PROGRAMS[kind])
    if program is None:
        package = "ray[serve]" if kind == "ray" else kind
        pytest.skip(f"{PROGRAMS[kind]} not found: pip install '{package}', and name its folder in $JAXSPEC_ROUTERS")
    command = [sys.executable, "scripts/replicas.py", kind, "--bin", str(Path(program).parent)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
