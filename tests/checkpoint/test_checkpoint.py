"""Finding, checking and streaming models: folders, shards, the hub, dummy weights."""

import json
import os
import shutil
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import httpx
import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import errors
from safetensors.numpy import load_file, save_file

from jaxspec.cache.mixers import WholeTexts
from jaxspec.checkpoint import CheckpointError, load_model, resolve
from jaxspec.checkpoint.params import assemble
from jaxspec.checkpoint.shards import ModelFolder
from jaxspec.config.options import ConfigError
from jaxspec.decoder.forward import forward, unembed
from jaxspec.models.families import MODELS
from jaxspec.models.model_config import ModelConfig
from tests.support import eager
from tests.support.tiny import BYTE_VOCAB, random_tensors, rewrite, tiny_checkpoint, tiny_config


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkpoint of its own, to be damaged."""
    return Path(shutil.copytree(tiny_checkpoint(), tmp_path / "model"))


def write_shards(folder: Path, tensors: dict[str, np.ndarray], shards: list[list[str]]) -> None:
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def edit_json(file: Path, **changes) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def load(source, **options):
    return load_model(str(source), progress=False, **options)


def assert_same(left, right, tolerance: float = 0.0) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance, rtol=0), left, right)


# Folders


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_params_are_the_declared_fusion_of_the_tensors(family):
    source = tiny_checkpoint(family, attention_bias=True)
    model, tensors = load(source), load_file(source / "model.safetensors")
    attn = "model.layers.1.self_attn."
    layer = model.params["layers"][1]
    fused = np.concatenate([tensors[attn + f"{x}_proj.weight"].T for x in "qkv"], axis=1)
    np.testing.assert_array_equal(layer["qkv"].values, fused)
    np.testing.assert_array_equal(layer["qkv_bias"], np.concatenate([tensors[attn + f"{x}_proj.bias"] for x in "qkv"]))
    np.testing.assert_array_equal(model.params["embed"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(model.params["head"].values, tensors["lm_head.weight"].T)
    assert model.family is MODELS[family]
    assert (model.name, model.path, model.tokenizer) == (str(source), str(source), None)


def test_shards_in_any_order_equal_one_file(folder):
    tensors = load_file(folder / "model.safetensors")
    expected = load(folder).params
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    write_shards(folder, tensors, [names[1::3], names[2::3], names[::3]])  # fused sources fall into different shards
    assert_same(load(folder).params, expected)


def test_the_index_decides_which_file_a_tensor_is_read_from(folder, caplog):
    """An overlay over old copies, whichever file comes first; a tensor that no index names isn't there."""
    expected, tensors = load(folder).params, load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    write_shards(folder, tensors, [names[::2], names[1::2]])
    stale = {name: tensor + 1 for name, tensor in tensors.items()} | {"model.extra.weight": np.ones(3, np.int8)}
    save_file(stale, folder / "a-old.safetensors")
    save_file({names[1]: tensors[names[1]]} | {n: stale[n] for n in names[2:]}, folder / "z-overlay.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    (folder / "model-00002-of-00002.safetensors").rename(folder / "b.safetensors")
    index |= {name: "b.safetensors" for name in names[3::2]} | {names[1]: "z-overlay.safetensors"}
    index |= {"model.layers.0.self_attn.rotary_emb.inv_freq": "a-old.safetensors"}  # names the old copies' file, too
    edit_json(folder / "model.safetensors.index.json", weight_map=index)
    assert_same(load(folder).params, expected)
    files = ModelFolder(folder, folder / "config.json")
    assert files.tensors().keys() == set(names)
    np.testing.assert_array_equal(files.tensor(names[1]), tensors[names[1]])
    assert {name: array.tolist() for name, array in files.some(names[:4])} == {
        n: tensors[n].tolist() for n in names[:4]
    }
    assert "its index doesn't name 1 of the tensors in its files; they are ignored" in caplog.text
    assert (
        "1 tensors that aren't in their files: model.layers.0.self_attn.rotary_emb.inv_freq isn't in a-old"
        in caplog.text
    )
    edit_json(folder / "model.safetensors.index.json", weight_map=index | {names[0]: "b.safetensors"})
    with pytest.raises(CheckpointError, match=f"missing {names[0]}"):  # though two other files have it
        load(folder)


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", None])
def test_params_are_cast(folder, stored, dtype):
    tensors = {name: tensor.astype(stored) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    params = load(folder, dtype=dtype).params
    expected = tensors["model.embed_tokens.weight"].astype(jnp.dtype(dtype or "float32"))  # None: tests run on a CPU
    assert params["embed"].dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(params["embed"]), expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {expected.dtype}


def test_host_memory_stays_under_a_budget(tmp_path, monkeypatch):
    """Eight shards of equal size, and one fused parameter across two of them."""
    monkeypatch.setattr(eager, "MOST_BYTES", 2**16)  # NumPy's memory is counted here
    hf = tiny_config("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=8, head_dim=64)
    tensors = random_tensors(hf, 0)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    shards = [[name for name in tensors if f"layers.{i}." in name] for i in range(8)]
    shards[0] += [name for name in tensors if "layers" not in name]
    shards[2].append(shards[1].pop(shards[1].index("model.layers.1.mlp.up_proj.weight")))
    write_shards(tmp_path, tensors, shards)
    del tensors
    files = ModelFolder(tmp_path, tmp_path / "config.json")
    declared = MODELS["llama"].tensors(files.config.decoder)
    shard = min(file.stat().st_size for file in files.files)
    assemble(declared, files.stored(), "float32")  # compiles, which allocates too
    tracemalloc.start()
    assemble(declared, files.stored(), "float32", budget=shard // 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * shard, f"{peak:,} bytes at peak, shards of at least {shard:,}"


def test_params_do_not_share_the_files_memory(folder):
    """On a CPU an array can alias host memory; the checkpoint must be free to change afterwards."""
    model = load(folder)
    before = np.array(model.params["embed"])
    file = folder / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.seek(size // 2)
        stream.write(b"\xff" * (size - size // 2))
    np.testing.assert_array_equal(model.params["embed"], before)


def test_end_tokens_are_those_of_both_configs(folder):
    edit_json(folder / "config.json", eos_token_id=7)
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 7, 3]}')
    assert resolve(str(folder)).config.eos_token_ids == (7, 9, 3)
    for name in ("config.json", "generation_config.json"):
        (folder / "generation_config.json").write_text("{}")
        edit_json(folder / name, eos_token_id=[9, "x"])
        with pytest.raises(ConfigError, match=f"^{name}: eos_token_id must be token ids, got 'x'"):
            resolve(str(folder))
        edit_json(folder / name, eos_token_id=7)


def test_how_to_sample_comes_along(folder, caplog):
    assert load(folder).sampling == {}
    says = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "max_new_tokens": 9}
    (folder / "generation_config.json").write_text(json.dumps(says))
    assert load(folder).sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95} and "ignored" not in caplog.text
    (folder / "generation_config.json").write_text(json.dumps(says | {"temperature": -1, "top_p": "most"}))
    assert load(folder).sampling == {"top_k": 20}
    assert "generation_config.json is ignored where it says: temperature must be" in caplog.text
    assert "top_p must be" in caplog.text


def test_a_tokenizer_comes_along():
    model = load(tiny_checkpoint(vocab=BYTE_VOCAB, tokenizer=True))
    assert model.tokenizer.encode("hi") == [104, 105]


# What doesn't fit


def test_a_tokenizer_larger_than_the_model_is_told(tmp_path, caplog):
    shutil.copytree(tiny_checkpoint(vocab=BYTE_VOCAB, tokenizer=True), tmp_path / "a")
    assert load(tmp_path / "a").tokenizer is not None and not caplog.records
    edit_json(tmp_path / "a" / "config.json", vocab_size=64)
    load(tmp_path / "a", load_format="dummy")
    (record,) = caplog.records
    assert "its tokenizer has token ids up to 258, the model 0 to 63" in record.getMessage()


def test_every_misfit_is_listed_with_the_nearest_name(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_prj.weight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    tensors["model.norm.weight"] = np.ones(33, np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)  # harmless
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "4 tensors do not fit" in message and "(2 missing, 1 misshapen, 1 unexpected)" in message
    assert (
        "missing model.layers.0.self_attn.q_proj.weight [64, 32]; nearest name found: "
        "model.layers.0.self_attn.q_prj.weight" in message
    )
    assert "missing model.layers.1.mlp.down_proj.weight [32, 64]" in message
    assert "misshapen model.norm.weight: found [33], expected [32]" in message
    assert "unexpected model.layers.0.self_attn.q_prj.weight [64, 32]" in message
    assert "inv_freq" not in message


def test_long_lists_are_cut(folder):
    edit_json(folder / "config.json", num_hidden_layers=40)
    with pytest.raises(CheckpointError, match=r"missing \.\.\. and \d+ more") as caught:
        load(folder)
    assert len(str(caught.value).splitlines()) < 20


def test_a_tied_checkpoint_may_carry_its_head(folder):
    edit_json(folder / "config.json", tie_word_embeddings=True)
    assert "head" not in load(folder).params


def break_truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def break_index(folder):
    tensors = load_file(folder / "model.safetensors")
    write_shards(folder, tensors, [list(tensors)[:3], list(tensors)[3:]])
    (folder / "model-00002-of-00002.safetensors").unlink()


def break_two_files(folder):
    shutil.copy(folder / "model.safetensors", folder / "b.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")


def break_integers(folder):
    rewrite(folder, {"model.norm.weight": np.ones(32, np.int8)})


def break_pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def break_into_pointer(folder, name="model.safetensors"):
    (folder / "model.safetensors").unlink()
    (folder / name).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 4404896\n"
    )


def break_link(folder, name="model.safetensors"):
    (folder / "model.safetensors").unlink()
    (folder / name).symlink_to("../../blobs/4d7a")


def break_indexed_link(folder):
    break_index(folder)
    (folder / "model-00002-of-00002.safetensors").symlink_to("../../blobs/4d7a")


def break_empty(folder):
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.parametrize("damage, message", [
    (break_truncate, r"model.safetensors \([\d,]+ bytes\) is truncated or not a safetensors file.*Download it again"),
    (break_into_pointer, r"model.safetensors is a Git LFS pointer.*run `git lfs pull` in \S+$"),
    (lambda f: break_into_pointer(f, "pytorch_model.bin"), "pytorch_model.bin is a Git LFS pointer"),
    (lambda f: break_into_pointer(f, "a.gguf"), "a.gguf is a Git LFS pointer"),
    (lambda f: break_into_pointer(f, "config.json"), "config.json is a Git LFS pointer"),
    (break_link, "model.safetensors is a link to ../../blobs/4d7a, a file that is gone. Download it again"),
    (lambda f: break_link(f, "pytorch_model.bin"), "pytorch_model.bin is a link to ../../blobs/4d7a, a file that"),
    (break_indexed_link, "model-00002-of-00002.safetensors is a link to .* gone"),
    (break_index, "names files that are not there: model-00002-of-00002.safetensors"),
    (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    (break_two_files, "has 2 safetensors files and no model.safetensors.index.json"),
    (break_integers, "model.norm.weight is stored as I8; supported: F32, F16, BF16"),
    (break_pickled, r"pytorch_model.bin \([\d,]+ bytes\) is truncated or not what torch.save writes"),
    (lambda f: (f / "model.safetensors").rename(f / "last.pth"), "no weights under a name that is read.*last.pth"),
    (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
    (break_empty, "no config.json, so it isn't a model folder; it holds: nothing"),
    (lambda f: (f / "config.json").write_text("{"), "can't read .*config.json"),
    (lambda f: (f / "config.json").write_text("[]"), "must hold a JSON object, found list"),
    (
        lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "fp8", "fmt": "e5m2"}),
        "quantised by fp8 with fmt 'e5m2', not e4m3",
    ),
    (
        lambda f: edit_json(f / "config.json", text_config={"quantization_config": {"quant_method": "hqq"}}),
        "quantised by hqq, not awq, .*not supported; use the model's FP8 or unquantised checkpoint",
    ),
])  # fmt: skip
def test_each_kind_of_damage_has_its_own_message(folder, damage, message):
    damage(folder)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        load(folder)


def test_options_that_make_no_sense(folder):
    with pytest.raises(ConfigError, match="--dtype must be one of auto, float32, bfloat16, float16, got 'int8'"):
        load(folder, dtype="int8")
    with pytest.raises(ConfigError, match="--load-format must be one of auto, dummy, got 'npz'"):
        load(folder, load_format="npz")
    with pytest.raises(CheckpointError, match="revision 'main' applies to hub ids only"):
        load(folder, revision="main")
    with pytest.raises(CheckpointError, match=r"not a \.gguf file; give its folder"):
        load(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="--load-format dummy"):
        load(folder / "config.json")


def test_a_context_is_checked_before_weights_are_read(monkeypatch, folder):
    monkeypatch.setattr("jaxspec.checkpoint.load.read_params", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=r"--context-length 9999 exceeds the 1024 positions of .*; give 1024 or less"):
        load(folder, context_length=9999)


# The hub


def test_a_hub_id_is_fetched_without_other_weights(monkeypatch, folder):
    calls = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **kw: calls.append((name, kw)) or str(folder)
    )
    model = load("org/model", revision="v1")
    assert_same(model.params, load(folder).params)
    assert (model.name, model.path) == ("org/model", str(folder))
    load("org/model", load_format="dummy")
    (name, full), (_, config_only) = calls  # with safetensors there, no third call asks for pickled weights
    assert (name, full["revision"]) == ("org/model", "v1")
    wanted = lambda kw, files: list(  # noqa: E731 - as the hub filters
        huggingface_hub.utils.filter_repo_objects(
            files, allow_patterns=kw["allow_patterns"], ignore_patterns=kw["ignore_patterns"]
        )
    )
    small = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    weights = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    others = ["pytorch_model.bin", "original/consolidated.00.pth", "consolidated.safetensors", "onnx/model.onnx"]
    assert wanted(full, small + weights + others) == small + weights
    assert wanted(config_only, small + weights + others) == small


def test_pickled_weights_are_fetched_if_there_are_no_others(monkeypatch, folder):
    (folder / "model.safetensors").rename(folder / "weights.moved")
    calls = []

    def download(name, allow_patterns, **_):
        calls.append(allow_patterns)
        if "pytorch_model*.bin" in allow_patterns:
            (folder / "weights.moved").rename(folder / "pytorch_model.bin")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin .* not what torch.save writes"):
        load("org/model")
    assert len(calls) == 2 and "*.safetensors" in calls[0] and "pytorch_model*.bin" not in calls[0]


def answer(kind: type, status: int) -> Exception:
    return kind("no", response=httpx.Response(status, request=httpx.Request("GET", "http://hub.invalid")))


@pytest.mark.parametrize("error, message", [
    (answer(errors.GatedRepoError, 403), "gated: accept its terms.*hf auth login"),
    (answer(errors.RepositoryNotFoundError, 404), "no such model, or it is private: check the name"),
    (answer(errors.RevisionNotFoundError, 404), "has no revision 'v9'"),
    (errors.OfflineModeIsEnabled("offline mode is on"), "can't be reached.*HF_HUB_OFFLINE"),
    (answer(errors.HfHubHTTPError, 500), "can't fetch org/model: no"),
])  # fmt: skip
def test_hub_errors_say_what_to_do(monkeypatch, error, message):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=message):
        load("org/model", revision="v9")


def test_an_unreachable_hub_is_an_error_at_once(tmp_path):
    """The real client against a closed port."""
    code = "from jaxspec.checkpoint import resolve; resolve('org/model')"
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "NO_PROXY": "*"}
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "CheckpointError: can't fetch org/model: no such file or folder here" in done.stderr
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("name, hint", [
    ("smollm2-135m", "did you mean smollm2-135m-instruct"),
    ("/no/such/model", "give a hub id"),
    ("./model", "no such file or folder"),
    ("model.gguf", "no such file or folder"),
    ("org/model.gguf", "no such file or folder"),
    ("a/b/c", "not a hub id"),
])  # fmt: skip
def test_names_that_are_nothing(monkeypatch, name, hint):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match=hint):
        load(name)


# Dummy weights


def test_dummy_weights_need_a_config_alone(tmp_path):
    hf = tiny_config("qwen3", attention_bias=True)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    model = load(tmp_path, load_format="dummy", dtype="bfloat16")
    declared = MODELS["qwen3"].tensors(ModelConfig.from_hf(hf).decoder)
    shapes = [param.shape for param in jax.tree.leaves(declared)]
    assert shapes == [array.shape for array in jax.tree.leaves(model.params)]
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype("bfloat16")}
    assert_same(load(tmp_path / "config.json", load_format="dummy", dtype="bfloat16").params, model.params)
    layer = model.params["layers"][0]
    assert (layer["attn_norm"] == 1).all() and (layer["qkv_bias"] == 0).all()


@pytest.mark.parametrize("quantization,says", [
    (None, r"GiB in bfloat16, more than .*; use a smaller model, --quantization fp8, .*, or a larger --tp-size"),
    ("fp8", "GiB in fp8, more than the device has free; use a smaller model, or a larger --tp-size"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_told_in_their_own_format(tmp_path, monkeypatch, quantization, says):
    def full(*given):
        raise MemoryError

    monkeypatch.setattr("jaxspec.checkpoint.load.dummy", full)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(hidden_size=128, intermediate_size=128)))
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path, load_format="dummy", dtype="bfloat16", quantization=quantization)


def test_dummy_weights_depend_on_seed_and_name_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    one, other = (load(tmp_path, load_format="dummy", seed=seed).params for seed in (0, 1))
    edit_json(tmp_path / "config.json", num_hidden_layers=3)
    deeper = load(tmp_path, load_format="dummy", seed=0).params
    assert_same(one["layers"], deeper["layers"][:2])
    assert not np.allclose(one["layers"][0]["qkv"].values, other["layers"][0]["qkv"].values)
    assert not np.allclose(one["layers"][0]["qkv"].values, one["layers"][1]["qkv"].values)


def test_dummy_activations_stay_moderate_in_a_deep_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(num_hidden_layers=18)))
    model = load(tmp_path, load_format="dummy")
    tokens = jnp.arange(16)[None]
    hidden = jax.jit(lambda params: forward(model.config.decoder, params, tokens, tokens, WholeTexts(), capture=(17,)))(
        model.params
    )
    assert 0.3 < jnp.std(hidden.features[0]) < 30
    assert 0.1 < jnp.std(unembed(model.params, hidden.last, model.config.decoder)) < 10


def test_dummy_still_refuses_what_it_does_not_know(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ConfigError, match="model_type 'mamba' is not supported"):
        load(tmp_path, load_format="dummy")
