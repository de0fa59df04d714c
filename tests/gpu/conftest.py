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
    if path := os.environ.get("JAXSPEC_FIGURES"):
        Path(path).write_text(text + "\n")
