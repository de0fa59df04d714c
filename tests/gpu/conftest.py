"""GPU tests need neither server nor network. Figures they take go to $JAXSPEC_FIGURES, a JSON file, and to stdout."""

import json
import os
from pathlib import Path

import pytest


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
