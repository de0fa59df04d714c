"""Checkpoints with nonsense in them: each field of each file, with a wrong value of each kind.

Whatever is in a file, it loads or ends in one of our errors, of one line and soon. `examine` does all that loading does
but for copying weights, so thousands of files take seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxspec import CheckpointError, ConfigError, ModelConfig
from jaxspec.checkpoint import load
from jaxspec.config.request import RequestError
from jaxspec.models.families import MODELS
from jaxspec.text.errors import TokenizerError
from tests.support.sample import one_in, rare
from tests.support.tiny import ARCHITECTURES, BYTE_VOCAB, tiny_checkpoint, tiny_config

NONSENSE = [
    None, True, False, 0, 1, -1, 3, 300_000, 2**31, 2**63, 10**20, 10**400, 0.5, -0.5, 1e300, float("nan"),
    float("inf"), "", "nonsense", "\0", "../../x", [], [None], [1], [-1], [10**20], ["nonsense"], [[1]], [{}], {},
    {"a": 1}, {"a": {}},
]  # fmt: skip
OURS = (CheckpointError, ConfigError, TokenizerError)
FUZZ = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    monkeypatch.setattr(load, "assemble", lambda declared, tensors, dtype, *_, **__: None)


def examine(path: Path, lines: int = 1) -> str | None:
    """Load a model but for its weights: what is said of it, or None if it loads."""
    began, said = time.monotonic(), None
    try:
        load.load_model(str(path), "float32", progress=False)
    except OURS as error:
        said = str(error)
        assert len(said) < 4000 and (said.count("\n") < lines or "not fit the model's config" in said), said
    assert time.monotonic() - began < 5
    return said


# config.json, by itself


OFTEN = ("gemma3", "gpt_oss", "llama", "qwen3_5_moe", "qwen3_moe")  # whose keys together are all families'


def halves():
    """Each family with every second value of each key, then with the others: in turn, `make test` has one of them."""
    for family, half in itertools.product(sorted(ARCHITECTURES), range(2)):
        often = family in OFTEN and half == OFTEN.index(family) % 2
        yield (family, half) if often else rare(family, half)


@pytest.mark.parametrize("family,half", list(halves()))
def test_each_key_of_a_config_with_nonsense_of_each_kind(family, half):
    config = tiny_config(family) | {
        key: None for key in ("rope_parameters", "rope_scaling", "text_config", "layer_types", "mlp_only_layers")
    }
    config |= {"partial_rotary_factor": 1.0, "bos_token_id": 1, "mtp_num_hidden_layers": 1}
    refused = 0
    for i, (key, value) in enumerate(itertools.product(config, NONSENSE)):
        if (i + i // len(NONSENSE)) % 2 != half:
            continue
        began = time.monotonic()
        try:
            MODELS[family].tensors(ModelConfig.from_hf({**config, key: value}).decoder)
        except ConfigError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 500, key
        assert time.monotonic() - began < 5, (key, value)
    assert refused > 100


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_a_rope_of_nonsense_is_refused_by_every_family(key):
    """Some families read it before the others' reader does."""
    for family, value in itertools.product(sorted(ARCHITECTURES), NONSENSE):
        with contextlib.suppress(ConfigError):
            ModelConfig.from_hf({**tiny_config(family), key: value})


SCALING = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
    "partial_rotary_factor": 1.0,
    "type": "llama3",
}


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_each_key_of_rope_scaling_with_nonsense_of_each_kind(name):
    ModelConfig.from_hf(tiny_config(**{name: SCALING}))
    for key, value in itertools.product(SCALING, NONSENSE):
        try:
            ModelConfig.from_hf(tiny_config(**{name: {**SCALING, key: value}}))
        except ConfigError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("key,value,says", [
    ("num_hidden_layers", 300_000, "num_hidden_layers must be a positive integer of at most 4096, got 300000"),
    ("eos_token_id", 10**20, "eos_token_id must be token ids, got 100000000000000000000"),
    ("eos_token_id", [[1]], r"eos_token_id must be token ids, got \[1\]"),
    ("vocab_size", -1, "vocab_size must be a positive integer, got -1"),
    ("rms_norm_eps", float("nan"), "rms_norm_eps must be a positive number within float32, got nan"),
    ("model_type", ["llama"], r"model_type \['llama'\] is not supported"),
    ("layer_types", 5, "layer_types must be a list of names, got 5"),
])  # fmt: skip
def test_what_is_said_of_nonsense(key, value, says):
    with pytest.raises(ConfigError, match=says):
        ModelConfig.from_hf(tiny_config(**{key: value}))


def test_end_tokens_outside_the_vocabulary_end_nothing():
    """Which a config may name that was made for a larger one."""
    config = ModelConfig.from_hf(tiny_config(vocab=64, eos=[3, 64, 2**31 - 1]))
    tokenizer = SimpleNamespace(eos_token_ids=(5, 3, 99), added_tokens={})
    assert load.Model(config, None, "float32", "m", None, tokenizer).eos_ids == (3, 5)


# the JSON files of a folder

JSON_FILES = ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]


@pytest.fixture
def folder(tmp_path):
    """A folder of its own, with every file."""
    shutil.copytree(tiny_checkpoint("llama", BYTE_VOCAB, tokenizer=True), tmp_path / "m")
    said = {"temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2], "repetition_penalty": 1.1, "min_p": 0.0}
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps(said))
    assert examine(tmp_path / "m") is None
    return tmp_path / "m"


def places(value, path=()):
    """The paths of everything in a JSON value, to four levels and three elements of a list."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, inner in itertools.islice(items, 40) if len(path) < 4 else ():
        yield from places(inner, (*path, key))


def changed(value, path, nonsense):
    if not path:
        return nonsense
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], nonsense)
    return copy


@pytest.mark.parametrize("name", JSON_FILES)
def test_json_files_with_nonsense_in_any_place(folder, name):
    file = folder / name
    original = json.loads(file.read_text())
    everywhere = sorted(places(original), key=repr)

    @FUZZ
    @given(st.sampled_from(everywhere), st.sampled_from(NONSENSE))
    def check(path, nonsense):
        file.write_text(json.dumps(changed(original, path, nonsense)))
        examine(folder)

    check()


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("text", [
    "",
    "[" * 100_000,
    '{"a":' * 100_000,
    '{"eos_token_id": ' + "[" * 900 + "]" * 900 + "}",
    '{"eos_token_id": 1' + "0" * 5000 + "}",
    '{"a": "\\ud800"}',
    "nul",
    "\0" * 100,
    "\udcff",
    "[]",
    "3",
    "null",
])  # fmt: skip
def test_json_files_that_are_none(folder, name, text):
    (folder / name).write_bytes(text.encode(errors="surrogateescape"))
    said = examine(folder)
    assert said is not None or text.startswith('{"a":') or name == "generation_config.json"


def test_an_index_that_points_elsewhere(folder):
    index = folder / "model.safetensors.index.json"
    for name in ("../m/model.safetensors", "/etc/passwd", "a\0b", "", ".", 5, None, ["a"], {}):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        assert str(index) in examine(folder)
    for weight_map in NONSENSE:
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert str(index) in examine(folder)


# safetensors


@pytest.mark.parametrize("half", [0, rare(1)])
def test_a_safetensors_header_with_nonsense_in_any_place(folder, half):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    name = next(iter(header.keys() - {"__metadata__"}))
    paths = sorted((path for path in places(header) if not path or path[0] in (name, "__metadata__")), key=repr)
    shapes = [[2**63], [2**32, 2**32], [0], [-1], [32] * 100]
    for path, nonsense in list(itertools.product(paths, NONSENSE + shapes))[half::2]:  # of an odd number: in turn
        text = json.dumps(changed(header, path, nonsense)).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data)
        examine(folder)
    for size in (0, 7, 8, 20, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert "truncated or not a safetensors file" in examine(folder)
    for claimed in (0, 2**63, 2**64 - 1, len(whole)):
        file.write_bytes(struct.pack("<Q", claimed) + whole[8:])
        assert examine(folder)


# GGUF

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
TOKENS = ["a", "b", "ab", "<end>"]
METADATA = {
    "general.architecture": (STRING, "llama"),
    "general.alignment": (U32, 32),
    "split.count": (U32, 0),
    "llama.block_count": (U32, 1),
    "llama.context_length": (U32, 64),
    "llama.embedding_length": (U32, 8),
    "llama.feed_forward_length": (U32, 16),
    "llama.attention.head_count": (U32, 2),
    "llama.attention.head_count_kv": (U32, 1),
    "llama.attention.key_length": (U32, 4),
    "llama.attention.value_length": (U32, 4),
    "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
    "llama.rope.freq_base": (F32, 1e4),
    "llama.rope.dimension_count": (U32, 4),
    "llama.rope.scaling.type": (STRING, "none"),
    "llama.expert_count": (U32, 0),
    "tokenizer.ggml.model": (STRING, "gpt2"),
    "tokenizer.ggml.pre": (STRING, "gpt-2"),
    "tokenizer.ggml.tokens": (ARRAY, (STRING, TOKENS)),
    "tokenizer.ggml.token_type": (ARRAY, (I32, [1, 1, 1, 3])),
    "tokenizer.ggml.merges": (ARRAY, (STRING, ["a b"])),
    "tokenizer.ggml.eos_token_id": (U32, 3),
    "tokenizer.ggml.bos_token_id": (U32, 3),
    "tokenizer.ggml.add_bos_token": (BOOL, True),
    "tokenizer.chat_template": (STRING, "{{ messages }}"),
}
SHAPES = {
    "token_embd.weight": (4, 8), "output_norm.weight": (8,), "output.weight": (4, 8), "rope_freqs.weight": (2,),
    "blk.0.attn_norm.weight": (8,), "blk.0.attn_q.weight": (8, 8), "blk.0.attn_k.weight": (4, 8),
    "blk.0.attn_v.weight": (4, 8), "blk.0.attn_output.weight": (8, 8), "blk.0.ffn_norm.weight": (8,),
    "blk.0.ffn_gate.weight": (16, 8), "blk.0.ffn_up.weight": (16, 8), "blk.0.ffn_down.weight": (8, 16),
}  # fmt: skip
WRONG = [
    (U32, 0), (U32, 1), (U32, 3), (U32, 2**31), (U32, 2**32 - 1), (I32, -1), (U64, 2**64 - 1), (F32, float("nan")),
    (F32, float("inf")), (F32, -1.0), (BOOL, True), (STRING, ""), (STRING, "nonsense"), (ARRAY, (U32, [])),
    (ARRAY, (U32, [1, 2])), (ARRAY, (STRING, ["nonsense"])), (ARRAY, (STRING, ["a b", "b nonsense"])),
    (ARRAY, (ARRAY, [(U32, [1])])), (ARRAY, (STRING, TOKENS * 2)),
]  # fmt: skip
PLAIN = {U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q"}


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def encoded(kind: int, value) -> bytes:
    if kind == STRING:
        return string(value)
    if kind == ARRAY:
        inner, values = value
        return struct.pack("<IQ", inner, len(values)) + b"".join(encoded(inner, each) for each in values)
    return struct.pack(PLAIN[kind], value)


def gguf_bytes(metadata=METADATA, tensors=None, counts=(None, None), align=32) -> bytes:
    """A GGUF file of float32 tensors. `tensors`: name -> (axes as stored, type, offset), where it differs."""
    infos, offset = [], 0
    for name, shape in SHAPES.items():
        axes, kind, where = (tensors or {}).get(name, (shape[::-1], 0, offset))
        infos.append(string(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, kind, where))
        offset += -(-4 * int(np.prod(shape)) // 32) * 32
    number = [len(infos), len(metadata)]
    number = [given if given is not None else own for given, own in zip(counts, number, strict=True)]
    head = b"GGUF" + struct.pack("<IQQ", 3, *number)
    head += b"".join(
        string(key) + struct.pack("<I", kind) + encoded(kind, value) for key, (kind, value) in metadata.items()
    )
    head += b"".join(infos)
    return head + bytes(-len(head) % align) + np.ones(offset // 4, np.float32).tobytes()


@pytest.fixture
def gguf_file(tmp_path):
    def write(data: bytes) -> Path:
        (tmp_path / "m.gguf").write_bytes(data)
        return tmp_path / "m.gguf"

    assert examine(write(gguf_bytes())) is None
    return write


@pytest.mark.parametrize("key", one_in(2, sorted(METADATA)))
def test_each_key_of_a_gguf_file_with_nonsense_of_each_kind(gguf_file, key):
    refused = sum(examine(gguf_file(gguf_bytes({**METADATA, key: wrong}))) is not None for wrong in WRONG)
    without = {name: value for name, value in METADATA.items() if name != key}
    examine(gguf_file(gguf_bytes(without)))
    assert refused > 3 or key == "tokenizer.chat_template" or key.startswith("tokenizer.ggml.add")


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.attn_q.weight", "rope_freqs.weight"])
def test_each_part_of_a_gguf_tensors_entry(gguf_file, name):
    axes = SHAPES[name][::-1]
    for shape in ((), (0,), (2**63,), (2**32, 2**32), (2**64 - 1, 2), (1,) * 9, (7, 3), axes[:1]):
        examine(gguf_file(gguf_bytes(tensors={name: (shape, 0, 0)})))
    for kind in (*range(40), 99, 2**32 - 1):
        examine(gguf_file(gguf_bytes(tensors={name: (axes, kind, 0)})))
    for offset in (1, 2**40, 2**63, 2**64 - 1):
        examine(gguf_file(gguf_bytes(tensors={name: (axes, 0, offset)})))


def test_counts_ends_and_nesting_of_a_gguf_file(gguf_file):
    for count in (0, 1, 2**31, 2**63, 2**64 - 1):
        assert examine(gguf_file(gguf_bytes(counts=(count, None))))
        assert examine(gguf_file(gguf_bytes(counts=(None, count))))
    whole = gguf_bytes()
    for size in range(0, len(whole), 37):
        assert examine(gguf_file(whole[:size]))
    deep = struct.pack("<IQ", ARRAY, 1) * 5000 + struct.pack("<IQ", U32, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("general.architecture") + struct.pack("<I", ARRAY)
    assert "nested more than" in examine(gguf_file(head + deep))
    vast = struct.pack("<IQ", STRING, 2**63)
    assert "truncated" in examine(gguf_file(head + vast))


@FUZZ
@given(st.integers(4, 1300), st.binary(min_size=1, max_size=8))
def test_a_gguf_file_with_any_bytes_replaced(tmp_path_factory, place, new):
    data = bytearray(gguf_bytes())
    data[place : place + len(new)] = new
    file = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    file.write_bytes(data)
    examine(file)


def test_a_generation_config_is_used_where_it_makes_sense(folder, caplog):
    """Report values that can't be used and leave them out, since the model needs none."""
    file = folder / "generation_config.json"
    for key, value in itertools.product(("temperature", "top_k", "top_p", "min_p", "repetition_penalty"), NONSENSE):
        file.write_text(json.dumps({key: value}))
        caplog.clear()
        sampling = load.load_model(str(folder), "float32", progress=False).sampling
        assert (key in sampling) or value is None or key in caplog.text
        try:
            load.SamplingParams(**sampling)
        except RequestError:
            pytest.fail(f"{key} {value!r} was let through")
