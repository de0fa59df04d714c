"""The official client's tests (`test_live.py`) against a model over several devices, and against several engines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", ['{"tp_size": 4}', '{"dp_size": 2}', '{"dp_size": 2, "tp_size": 2}'])
def test_the_official_client_with(options):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PJRT_NPROC": "16"}
    command = [sys.executable, "-m", "pytest", "tests/server/test_live.py", "-p", "no:cacheprovider", "-x"]
    env |= {"JAXSPEC_LIVE": options}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-8000:] + done.stderr[-2000:]
