"""Tensors that several threads read, in pieces, within a bound of memory."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jaxspec.checkpoint import CheckpointError, ModelFolder, params, stored
from jaxspec.checkpoint.params import assemble
from jaxspec.checkpoint.stored import Computed, Readers, Stored
from jaxspec.models.families import MODELS
from tests.support.tiny import tiny_checkpoint

TABLE = np.arange(6 * 5, dtype=np.int32).reshape(6, 5)


@pytest.fixture
def table(tmp_path):
    (tmp_path / "table").write_bytes(b"head" + TABLE.tobytes())
    return Stored(tmp_path / "table", 4, TABLE.shape, TABLE.dtype)


def checkpoint(family="llama", **sizes):
    folder = tiny_checkpoint(family, **sizes)
    files = ModelFolder(folder, folder / "config.json")
    return files, MODELS[files.config.model_type].tensors(files.config.decoder)


def test_tensors_are_read_in_pieces_to_where_they_stay(monkeypatch, table):
    monkeypatch.setattr(stored, "PIECE", 7)
    made = Computed(8, lambda: np.float32([1, 2]))
    with Readers(3) as readers:
        whole, two, array = readers.read([table, made, TABLE])
        stack = readers.concatenated([table[4:], table[(slice(1, 3),)], table[2:2]])
    np.testing.assert_array_equal(whole, TABLE)
    np.testing.assert_array_equal(stack, np.concatenate([TABLE[4:], TABLE[1:3]]))
    assert list(two) == [1, 2] and array is TABLE


def test_a_file_that_became_shorter_is_truncated(table):
    table.file.write_bytes(b"headless")
    with Readers(2) as readers, pytest.raises(CheckpointError, match="table is truncated: it ends at byte 8"):
        readers.read([table])


def test_several_tensors_are_read_at_once():
    files, declared = checkpoint()
    together = threading.Barrier(4, timeout=10)
    waits = lambda tensor, i: lambda: (i < 4 and together.wait(), tensor.read())[1]  # noqa: E731
    tensors = {
        name: Computed(tensor.nbytes, waits(tensor, i)) for i, (name, tensor) in enumerate(files.stored().items())
    }
    assemble(declared, tensors, "float32", threads=4)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_host_holds_what_the_budget_allows(monkeypatch, family):
    files, declared = checkpoint(family)
    sizes, held, most, guard = {}, 0, 0, threading.Lock()
    tensors = files.stored()
    whole = [
        sum(tensors[name].nbytes for name in [*param.sources, *params._beside(param)])
        for param in jax.tree.leaves(declared)
    ]
    budget = 2 * max(whole)

    class Pool(ThreadPoolExecutor):
        def submit(self, run, *given):
            nonlocal held, most
            if run.__name__ == "load":
                with guard:
                    held, sizes[given[0]] = held + whole[given[0]], whole[given[0]]
                    most = max(most, held)
            return super().submit(run, *given)

    def done(names):
        nonlocal held
        held -= sum(tensors[name].nbytes for name in names)

    monkeypatch.setattr(params, "ThreadPoolExecutor", Pool)
    assemble(declared, tensors, "float32", budget=budget, done=done)
    assert max(whole) < most <= budget < sum(whole) and held == 0 and len(sizes) == len(whole)


def test_an_error_of_one_tensor_ends_the_rest():
    files, declared = checkpoint()
    read = []

    def damaged():
        read.append(None)
        raise CheckpointError("damaged")

    tensors = {name: Computed(tensor.nbytes, damaged) for name, tensor in files.stored().items()}
    with pytest.raises(CheckpointError, match="damaged"):
        assemble(declared, tensors, "float32", threads=1, budget=1)
    assert len(read) < len(tensors) / 2
