"""Programs on disk: found again by what made them, and whatever goes wrong costs a compilation, not a start.

That programs do run again can be shown on a GPU only; here a stand-in for jax's serialisation is kept and found.
"""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxspec.compiling import executable_store
from jaxspec.compiling.executable_store import Executables

ARGUMENTS = {"a": jnp.zeros((2, 3)), "b": jnp.zeros((4,), jnp.int32)}


@pytest.fixture(autouse=True)
def plain_serialisation(monkeypatch):
    """A "program" is any object that pickles; loading gives it back in a list."""
    monkeypatch.setattr(executable_store.serialize_executable, "serialize", lambda program: (program, "in", "out"))
    load = lambda *program, execution_devices: list(program)  # noqa: E731
    monkeypatch.setattr(executable_store.serialize_executable, "deserialize_and_load", load)


def test_a_program_is_found_again_with_its_notes(tmp_path):
    Executables(tmp_path / "new", "model").save(("round", 8), ARGUMENTS, "program", {"kernel": 1})
    store = Executables(tmp_path / "new", "model")
    assert store.load(("round", 8), ARGUMENTS) == (["program", "in", "out"], {"kernel": 1})


def test_a_program_of_one_device_runs_on_one_where_there_are_several(tmp_path, monkeypatch):
    first, second = jax.devices()[0], SimpleNamespace()
    monkeypatch.setattr(executable_store.jax, "devices", lambda: [first, second])
    load = lambda *program, execution_devices: execution_devices  # noqa: E731
    monkeypatch.setattr(executable_store.serialize_executable, "deserialize_and_load", load)
    Executables(tmp_path, "model").save("round", ARGUMENTS, "program", {})
    assert Executables(tmp_path, "model").load("round", ARGUMENTS) == ([first], {})


@pytest.mark.parametrize("made_by, key, arguments", [
    ("another model", ("round", 8), ARGUMENTS),
    ("model", ("round", 16), ARGUMENTS),
    ("model", ("round", 8), ARGUMENTS | {"a": jnp.zeros((2, 4))}),
    ("model", ("round", 8), ARGUMENTS | {"a": jnp.zeros((2, 3), jnp.int32)}),
    ("model", ("round", 8), {"a": ARGUMENTS["a"], "c": ARGUMENTS["b"]}),
])  # fmt: skip
def test_it_is_found_for_nothing_else(tmp_path, made_by, key, arguments):
    Executables(tmp_path, "model").save(("round", 8), ARGUMENTS, "program", {})
    assert Executables(tmp_path, made_by).load(key, arguments) is None


@pytest.mark.parametrize("changed", ["source", "flags"])
def test_another_source_or_flag_makes_another_program(tmp_path, monkeypatch, changed):
    Executables(tmp_path, "model").save("round", ARGUMENTS, "program", {})
    if changed == "source":
        monkeypatch.setattr(executable_store, "source_digest", lambda: "edited")
    else:
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    assert Executables(tmp_path, "model").load("round", ARGUMENTS) is None


def test_the_source_is_every_file_below(tmp_path):
    (tmp_path / "models").mkdir()
    digests = set()
    for name, text in (("a.py", ""), ("a.py", "x"), ("models/b.py", ""), ("models/b.py", "x"), ("models/c.py", "x")):
        (tmp_path / name).write_text(text)
        digests.add(executable_store.source_digest.__wrapped__(tmp_path))
    assert len(digests) == 5


def test_a_file_that_cannot_be_read_is_told_of_and_ignored(tmp_path, caplog):
    store = Executables(tmp_path, "model")
    store.save("round", ARGUMENTS, "program", {})
    (path,) = tmp_path.iterdir()
    path.write_bytes(pickle.dumps("program")[:-3])
    with caplog.at_level(logging.WARNING, "jaxspec"):
        assert store.load("round", ARGUMENTS) is None
    assert str(path) in caplog.text


def flips(count, size):
    """So many bits of a file of `size` bytes, all over it."""
    return [i * 8 * size // count for i in range(count)]


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_a_flipped_bit_is_noticed_before_anything_is_parsed(tmp_path, monkeypatch, count):
    store = Executables(tmp_path / "kept", "model")
    store.save("round", ARGUMENTS, "program" * 1000, {"kernel": 1})
    (path,) = (tmp_path / "kept").iterdir()
    whole = path.read_bytes()
    monkeypatch.setattr(executable_store.pickle, "loads", lambda data: pytest.fail("it was parsed"))
    for bit in flips(count, len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        assert store.load("round", ARGUMENTS) is None


def test_a_file_under_another_programs_name_is_refused(tmp_path):
    store = Executables(tmp_path / "kept", "model")
    store.save(1, ARGUMENTS, "program", {})
    (first,) = (tmp_path / "kept").iterdir()
    kept = first.read_bytes()
    store.save(2, ARGUMENTS, "another", {})
    (second,) = {*(tmp_path / "kept").iterdir()} - {first}
    second.write_bytes(kept)
    assert store.load(2, ARGUMENTS) is None


@pytest.mark.parametrize("what, mode", [("folder", 0o777), ("folder", 0o770), ("file", 0o666), ("file", 0o660)])
def test_what_others_can_write_to_is_not_run(tmp_path, caplog, what, mode):
    folder, ran = tmp_path / "kept", tmp_path / "ran"
    store = Executables(folder, "model")
    store.save("round", ARGUMENTS, Planted(ran), {})
    (file,) = folder.iterdir()
    (folder if what == "folder" else file).chmod(mode)
    for _ in range(2):
        assert store.load("round", ARGUMENTS) is None
    assert not ran.exists()
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and f"others can write to {folder if what == 'folder' else file}, until" in said[0]
    assert "no program of it is run" in said[0] and "JAXSPEC_CACHE" in said[0]
    if what == "folder":
        store.save("another", ARGUMENTS, "program", {})
        assert list(folder.iterdir()) == [file]
    (folder if what == "folder" else file).chmod(0o700)
    assert store.load("round", ARGUMENTS) is not None and ran.exists()


class Planted:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_what_belongs_to_another_user_is_not_run(tmp_path, monkeypatch, caplog):
    store = Executables(tmp_path / "kept", "model")
    store.save("round", ARGUMENTS, "program", {})
    monkeypatch.setattr(executable_store.os, "geteuid", lambda: 4321)
    mine = (tmp_path / "kept").stat().st_uid
    assert (store.load("round", ARGUMENTS) is None) == (mine != 0)  # root may do anything anyhow
    status = SimpleNamespace(st_uid=1234, st_mode=0o700)
    with pytest.raises(executable_store.NotPrivate, match="belongs to user 1234"):
        executable_store.refuse_unless_private(tmp_path, status)


def test_folder_and_files_are_for_their_user_alone(tmp_path):
    Executables(tmp_path / "new" / "kept", "model").save("round", ARGUMENTS, "program", {})
    (file,) = (tmp_path / "new" / "kept").iterdir()
    assert [path.stat().st_mode & 0o777 for path in (file.parent, file)] == [0o700, 0o600]


def test_a_program_that_cannot_be_kept_stops_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    store = Executables(tmp_path / "file", "model")
    with caplog.at_level(logging.INFO, "jaxspec"):
        store.save("round", ARGUMENTS, "program", {})
    assert "can't be kept" in caplog.text


def test_two_writers_with_one_process_id_have_files_of_their_own(tmp_path, monkeypatch):
    """Write as in containers that share the folder, in each of which the server is process 1."""
    write, loose = Path.write_bytes, []

    def slowly(path, data):
        loose.append(path)
        if len(loose) == 1:
            Executables(tmp_path, "model").save("round", ARGUMENTS, "the other's", {})
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", slowly)
    store = Executables(tmp_path, "model")
    store.save("round", ARGUMENTS, "program", {})
    assert len(set(loose)) == 2
    assert store.load("round", ARGUMENTS)[0][0] == "program" and len(list(tmp_path.iterdir())) == 1


def test_what_could_not_be_written_whole_is_removed(tmp_path, monkeypatch):
    write = Path.write_bytes

    def full(path, data):
        write(path, data[:5])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    Executables(tmp_path, "model").save("round", ARGUMENTS, "program", {})
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_is_said_once(tmp_path, caplog):
    """A folder that can't be made stands for it: as root, no folder is read-only."""
    caplog.set_level("DEBUG", "jaxspec")
    (tmp_path / "file").write_text("")
    store = Executables(tmp_path / "file" / "programs", "test")
    for key in (1, 2):
        store.save(key, ARGUMENTS, "program", None)
        assert store.load(key, ARGUMENTS) is None
    told = [record.levelname for record in caplog.records if "can't be kept" in record.message]
    assert told == ["WARNING", "DEBUG"]


@pytest.mark.parametrize("usable", [True, False])
def test_a_cache_folder_that_cant_be_written_to_costs_a_warning(tmp_path, monkeypatch, caplog, usable):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path if usable else tmp_path / "file"))
    set_to = {}
    config = SimpleNamespace(jax_compilation_cache_dir=None, update=set_to.__setitem__)
    monkeypatch.setattr(executable_store, "jax", SimpleNamespace(config=config))
    executable_store.enable_compilation_cache()
    assert ("jax_compilation_cache_dir" in set_to) == usable
    assert ("can't be kept" in caplog.text) != usable
    if usable:
        set_to.clear()
        (tmp_path / "programs").chmod(0o777)
        executable_store.enable_compilation_cache()
        assert not set_to and "others can write to" in caplog.text
