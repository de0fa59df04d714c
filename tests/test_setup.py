"""`scripts/setup.sh`, which make runs first: whose environment it touches."""

import json
import subprocess
import venv
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "setup.sh"


@pytest.fixture
def clones(tmp_path):
    """Two clones, of which the first has an environment and the second a link to it."""
    owner, here = tmp_path / "owner", tmp_path / "here"
    venv.create(owner / ".venv", with_pip=False)
    here.mkdir()
    (here / ".venv").symlink_to(owner / ".venv")
    return owner, here


def set_up(owner, here):
    """Run the script in the clone `here`, once `owner`'s jaxspec is installed in the environment: its messages."""
    (packages,) = (here / ".venv" / "lib").glob("python*/site-packages")
    info = packages / "jaxspec-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxspec\nVersion: 0.0.0\n")
    (info / "direct_url.json").write_text(json.dumps({"url": f"file://{owner}", "dir_info": {"editable": True}}))
    (here / "some.lock").write_text("numpy==2.0.0\n")
    ended = subprocess.run(["sh", SCRIPT, "some.lock"], cwd=here, capture_output=True, text=True)
    assert ended.returncode == 1, "without pip it does not go far"
    return ended.stderr


def test_the_environment_of_another_clone_stays_as_it_is(clones):
    owner, here = clones
    told = set_up(owner, here)
    assert f".venv is a link to the environment of {owner}" in told and "remove the link" in told
    assert told.count("\n") == 1 and not (owner / ".venv" / "pip.log").exists()


@pytest.mark.parametrize("gone", [False, True])
def test_a_linked_environment_that_no_other_clone_uses_is_set_up(clones, tmp_path, gone):
    _, here = clones
    assert "No module named pip" in set_up(tmp_path / "gone" if gone else here, here)
