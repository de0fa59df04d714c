"""`pytorch_model.bin` without torch: equal to what torch saved, and nothing in it ever runs."""

import contextlib
import io
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspec
from jaxspec import load_drafter, load_model
from jaxspec.checkpoint import CheckpointError, ModelFolder, tensor_pickle
from jaxspec.checkpoint.bin_file import BinFile

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
SAVED = GOLDEN / "bin" / "whole" / "pytorch_model.bin"


# -- what torch saved --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["whole", "sharded"])
def test_tensors_are_those_of_the_safetensors_file(folder):
    files = ModelFolder(GOLDEN / "bin" / folder, GOLDEN / "bin" / folder / "config.json")
    wanted, listed, read = load_file(GOLDEN / "eagle/safeailab-eagle/model.safetensors"), files.tensors(), {}
    for name, stored in files.stored().items():
        tensor = stored.read()
        read[name] = tensor
        np.testing.assert_array_equal(tensor, wanted[name].astype(tensor.dtype))
        np.testing.assert_array_equal(files.tensor(name), tensor)
        assert listed[name].shape == tensor.shape and listed[name].nbytes == tensor.nbytes
        assert tensor.flags.c_contiguous and tensor.flags.owndata
    assert read.keys() == wanted.keys() == listed.keys()
    assert read["embed_tokens.weight"].dtype == np.float16
    assert read["layers.0.mlp.up_proj.weight"].dtype == np.float32
    assert read["fc.weight"].dtype == ml_dtypes.bfloat16


def test_the_golden_file_has_a_transposed_view_and_a_shared_storage():
    with BinFile(SAVED) as file:
        held = file._views
    assert held["fc.weight"].strides == (1, 32)
    heads = [held[f"layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert len({view.storage for view in heads}) == 1 and [view.offset for view in heads] == [0, 1024, 1536]


@pytest.mark.parametrize("folder", ["whole", "sharded"])
def test_the_drafter_drafts_as_its_original(folder):
    target = load_model(str(GOLDEN / "eagle" / "target"), dtype="float32", progress=False)
    golden = np.load(GOLDEN / "eagle" / "safeailab-eagle.npz")
    row = golden["lengths"].tolist().index(150)
    prop = jaxspec.propose(target, load_drafter(str(GOLDEN / "bin" / folder), target), golden["ids"].tolist(), 4)
    assert prop.tokens.tolist() == golden["tokens"][row].tolist()
    np.testing.assert_allclose(prop.logits, golden["logits"][row], atol=5e-4)


def test_safetensors_come_first(tmp_path):
    shutil.copytree(GOLDEN / "eagle" / "safeailab-eagle", tmp_path, dirs_exist_ok=True)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never looked at")
    assert [file.name for file in ModelFolder(tmp_path, tmp_path / "config.json").files] == ["model.safetensors"]


def test_the_legacy_format_is_refused_with_what_to_do():
    with pytest.raises(CheckpointError, match=r"before version 1\.6.*Only the zip is read.*save_file\(torch\.load"):
        BinFile(GOLDEN / "bin" / "legacy.bin")


# -- files of our own making -------------------------------------------------------------------------------------------


class Named:
    """Pickles as a global of this name, which needs not exist; called with `arguments` if there are any."""

    def __init__(self, name: str, *arguments):
        self.name, self.arguments = name, arguments


class Pickler(pickle._Pickler):
    """Python's own pickler written in Python, taught names and persistent ids."""

    def persistent_id(self, value):
        return value["persistent"] if isinstance(value, dict) and "persistent" in value else None

    def save(self, value, save_persistent_id=True):
        if not isinstance(value, Named):
            return super().save(value, save_persistent_id)
        module, _, name = value.name.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
        if value.arguments:
            super().save(value.arguments)
            self.write(pickle.REDUCE)


def storage(kind="torch.FloatStorage", key="0", elements=4, where="cpu"):
    return {"persistent": ("storage", Named(kind), key, where, elements)}


def tensor(offset=0, shape=(2, 2), strides=(2, 1), of=None, *more):
    return Named("torch._utils._rebuild_tensor_v2", of or storage(), offset, shape, strides, False, None, *more)


def pickled(value) -> bytes:
    out = io.BytesIO()
    Pickler(out, protocol=2).dump(value)
    return out.getvalue()


FOUR = struct.pack("4f", 1, 2, 3, 4)


def save(file, value, data=FOUR, how=zipfile.ZIP_STORED, **more) -> Path:
    with zipfile.ZipFile(file, "w", how) as archive:
        archive.writestr("a/data.pkl", value if isinstance(value, bytes) else pickled(value))
        archive.writestr("a/data/0", data)
        for name, held in more.items():
            archive.writestr(f"a/{name}", held)
    return file


def read(file) -> dict[str, np.ndarray]:
    with BinFile(file) as opened:
        return {name: tensor.read() for name, tensor in opened.stored().items()}


def test_views_read_as_their_strides_say(tmp_path):
    held = {
        "t": tensor(strides=(1, 2)),
        "tail": tensor(2, (2,), (1,)),
        "one": tensor(3, (), ()),
        "none": tensor(9, (0,), (1,)),
    }
    got = read(save(tmp_path / "x.bin", held, byteorder="little"))
    assert {name: value.tolist() for name, value in got.items()} == {
        "t": [[1, 3], [2, 4]], "tail": [3, 4], "one": 4, "none": []
    }  # fmt: skip


@pytest.mark.parametrize("value", [
    OrderedDict(w=tensor()),
    {"w": tensor(0, (2, 2), (2, 1), None, {})},
    {"w": Named("torch._utils._rebuild_parameter", tensor(), True, OrderedDict())},
])  # fmt: skip
@pytest.mark.parametrize("protocol", [2, 4])
def test_each_way_to_save_a_tensor(value, protocol, tmp_path):
    out = io.BytesIO()
    Pickler(out, protocol=protocol).dump(value)
    assert read(save(tmp_path / "x.bin", out.getvalue()))["w"].tolist() == [[1, 2], [3, 4]]


# -- what is refused ---------------------------------------------------------------------------------------------------

RAN = []


class Runs:
    """Runs `ran` if it is unpickled, as hostile files do."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def ran(*arguments):
    RAN.append(arguments)
    return {}


HOSTILE = {
    "a reduce that runs a shell": (pickle.dumps({"w": Runs(os.system, "exit 0")}, 2), r"asks for '(posix|nt).system'"),
    "eval": (pickle.dumps(Runs(eval, "ran()"), 4), r"asks for '(__builtin__|builtins).eval'.*Nothing was run"),
    "a function of this file": (pickle.dumps(Runs(ran, 1), 2), r"asks for 'tests\.checkpoint\.test_bin_file\.ran'"),
    "getattr beside torch": (pickled(Named("torch._utils.__builtins__.eval", "1")), r"asks for 'torch\._utils\.__buil"),
    "an old instance": (b"(ios\nsystem\n(S'x'\no.", "opcode INST has no place"),
    "a class made anew": (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "opcode NEWOBJ has no place"),
    "an extension": (b"\x80\x02\x82\x01.", "opcode EXT1 has no place"),
    "storage type as function": (pickled({"w": Named("torch.FloatStorage", 1)}), "'torch.FloatStorage' is called"),
    "attributes on a tensor": (pickled({"w": tensor()})[:-2] + b"}b.", "attributes are set on a"),
    "attributes on a global": (b"\x80\x02ctorch\nFloatStorage\n}b.", "attributes are set on 'torch.FloatStorage'"),
    "a persistent id in another": ({"w": tensor(of={"persistent": ("storage", storage(), "0", "cpu", 4)})}, "no ref"),
    "a persistent id of a file": ({"w": tensor(of={"persistent": "/etc/passwd"})}, "a str is no reference"),
    "a key out of the archive": ({"w": tensor(of=storage(key="../../data.pkl"))}, "holds 0 bytes where"),
    "a storage larger than its entry": ({"w": tensor(of=storage(elements=5))}, "holds 16 bytes .* need 20"),
    "a huge storage": ({"w": tensor(of=storage(elements=2**61))}, "holds 16 bytes where"),
    "a negative storage": ({"w": tensor(of=storage(elements=-4))}, "no reference to a storage"),
    "two sizes of a storage": ({"a": tensor(), "b": tensor(0, (1,), (1,), storage(elements=1))}, "has two sizes"),
    "a huge tensor of one element": ({"w": tensor(0, (2**40,), (0,))}, "doesn't fit its storage of 4 elements"),
    "a tensor beyond its storage": ({"w": tensor(1)}, "doesn't fit its storage"),
    "strides beyond its storage": ({"w": tensor(0, (2, 2), (3, 1))}, "doesn't fit its storage"),
    "a negative stride": ({"w": tensor(3, (4,), (-1,))}, "numbers of 0 or more"),
    "a negative offset": ({"w": tensor(-1)}, "numbers of 0 or more"),
    "a negative size": ({"w": tensor(0, (-2, -2))}, "numbers of 0 or more"),
    "an overflowing size": ({"w": tensor(0, (2**63, 2), (1, 1))}, "numbers of 0 or more"),
    "sizes without strides": ({"w": tensor(0, (2, 2), (1,))}, "numbers of 0 or more"),
    "a size that is true": ({"w": tensor(0, (True,), (1,))}, "numbers of 0 or more"),
    "a number for a tensor": ({"w": 1.0}, "holds a float under 'w'"),
    "a training checkpoint": ({"model": {"w": tensor()}}, "holds a dict under 'model'"),
    "a list of tensors": ([tensor()], "holds a list, not tensors by name"),
    "a pickle cut short": (pickled({"w": tensor()})[:-1], "is damaged"),
    "a pickle of nothing": (b"", "is damaged"),
    "a memo never written": (b"\x80\x02j\xff\xff\xff\xff.", "is damaged"),
    "an item without a dict": (b"\x80\x02K\x01K\x02s.", "is damaged"),
    "a mark alone": (b"\x80\x02(.", "is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_pickle_is_refused_by_a_sentence_and_nothing_runs(case, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "system", ran)
    value, message = HOSTILE[case]
    with pytest.raises(CheckpointError, match=message) as error:
        read(save(tmp_path / "x.bin", value))
    assert not RAN and len(str(error.value)) < 700


def test_nested_tuples_are_not_written_out(tmp_path):
    """Each holds the one before twice: 200 bytes that would print as 2^40."""
    bomb = b"\x80\x02)q\x00" + b"".join(
        b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(40)
    )
    for tail in (b".", b"}q\x7fK\x01h\x28sh\x7f."):
        with pytest.raises(CheckpointError):
            read(save(tmp_path / "x.bin", bomb + tail))


def test_a_damaged_archive_is_refused(tmp_path):
    good = {"w": tensor()}
    cut, whole = tmp_path / "cut.bin", save(tmp_path / "x.bin", good).read_bytes()
    for data, message in [
        (whole[:-30], "is truncated or not what torch.save writes"),
        (whole[: len(whole) // 2], "is truncated or not what torch.save writes"),
        (b"", "doesn't begin as a zip"),
        (b"version https://git-lfs.github.com/spec/v1\n", "doesn't begin as a zip"),
    ]:
        cut.write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            read(cut)
    for held, message in [
        ({"how": zipfile.ZIP_DEFLATED}, "'a/data.pkl' is compressed or encrypted"),
        ({"byteorder": "big"}, "big-endian"),
        ({"b/data.pkl": b""}, "2 entries called data.pkl"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            read(save(tmp_path / "y.bin", good, **held))
    with pytest.raises(CheckpointError, match=r"0 entries called data\.pkl"), zipfile.ZipFile(cut, "w") as archive:
        archive.writestr("a/code", b"x")
        archive.close()
        read(cut)


@pytest.mark.filterwarnings("ignore:invalid escape:DeprecationWarning")
def test_damage_anywhere_is_an_error_or_harmless(tmp_path):
    """Bytes of the pickle, and of the whole file, changed at random: a `CheckpointError` or tensors, never more."""
    random.seed(0)
    with zipfile.ZipFile(SAVED) as archive:
        original = archive.read("pytorch_model/data.pkl")
    for _ in range(1000):
        changed = bytearray(original)
        for _ in range(random.choice((1, 1, 2, 8))):
            changed[random.randrange(len(changed))] = random.choice((random.randrange(256), *b"\x80cRbQ.(t}s\x85\x86"))
        try:
            tensor_pickle.views(bytes(changed), "x.bin")
        except CheckpointError as error:
            assert len(str(error)) < 800
    file, whole = tmp_path / "x.bin", save(tmp_path / "y.bin", {"w": tensor()}).read_bytes()
    for _ in range(1000):
        changed = bytearray(whole)
        changed[random.randrange(len(changed))] = random.randrange(256)
        file.write_bytes(changed)
        with contextlib.suppress(CheckpointError):
            assert all(value.nbytes <= 64 for value in read(file).values())


def test_an_index_names_files_of_its_own_kind(tmp_path):
    shutil.copytree(GOLDEN / "bin" / "sharded", tmp_path, dirs_exist_ok=True)
    index = tmp_path / "pytorch_model.bin.index.json"
    for name in ("../pytorch_model.bin", "x.safetensors", "config.json"):
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(CheckpointError, match=r"weight_map must name \.bin files beside it"):
            ModelFolder(tmp_path, tmp_path / "config.json")
