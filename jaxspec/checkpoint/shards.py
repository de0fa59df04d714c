"""A Hugging Face model folder: config.json, weights in one file or several, tokenizer files.

Weights are safetensors; without those, `pytorch_model.bin`, whose pickle is read without running any of it
(`tensor_pickle`).

Where there is an index, it decides which tensors there are, and from which file each is read.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxspec.checkpoint import packed, pooling, quantization
from jaxspec.checkpoint.bin_file import BinFile
from jaxspec.checkpoint.check import CheckpointError, TensorInfo, read_json, refuse_stand_in
from jaxspec.checkpoint.pooling import Pooling
from jaxspec.checkpoint.stored import DTYPES, Computed, Stored
from jaxspec.config.json_values import shown
from jaxspec.config.options import ConfigError
from jaxspec.images.image_reader import PROCESSOR_FILES, ImageReader, image_reader
from jaxspec.models.model_config import ModelConfig, end_tokens, is_token
from jaxspec.text.errors import TokenizerError
from jaxspec.text.tokenizer import Tokenizer

log = logging.getLogger("jaxspec")

_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of an element, for the dtypes that weights may have
_INDICES = {"I64": 8, "BOOL": 1}  # and those of other tensors that models come with
_MAPS = ("d2t", "t2d")  # maps between vocabularies, which drafters come with
_INTEGERS = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}  # theirs
_SAFETENSORS = "model.safetensors"
_BIN = "pytorch_model.bin"
_TOKENIZER_JSON = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
_VOCABULARIES = ("tokenizer.json", "vocab.json", "tokenizer.model")


class ModelFolder:
    """A model folder whose config.json has been read (`hf`) and whose weights have been located, not opened."""

    def __init__(self, folder: Path, config_file: Path, weights: bool = True):
        """**Raises:** `CheckpointError` naming the file that is missing or at fault, or a format of weights that isn't
        supported."""
        self.path = folder
        self.config_file = config_file
        self.hf = read_json(config_file)
        in_config = quantization.config_of(self.hf, config_file) is not None
        if not in_config and (own := quantization.beside_config(config_file.parent)) is not None:
            self.hf = {**self.hf, "quantization_config": own}
        self.packed = packed.read(self.hf, config_file)
        self.quantization = self.packed.quantization if self.packed else quantization.read(self.hf, config_file)
        self.files, self._index = find_shards(folder) if weights else ((), None)
        for file in self.files:
            refuse_stand_in(file)

    @functools.cached_property
    def generation(self) -> dict[str, Any]:
        """Contents of the generation_config.json beside config.json, if there is one. **Raises:** `CheckpointError` if
        it can't be read."""
        file = self.config_file.parent / "generation_config.json"
        return read_json(file) if file.is_file() else {}

    @functools.cached_property
    def config(self) -> ModelConfig:
        """Config of a target model by config.json, with the end tokens of the generation_config.json beside it added.

        **Raises:** `ConfigError` as `ModelConfig.from_hf`, `CheckpointError` for a file that can't be read.
        """
        more = self.generation.get("eos_token_id")
        if bad := [token for token in end_tokens(more) if not is_token(token)]:
            raise ConfigError(f"generation_config.json: eos_token_id must be token ids, got {shown(bad[0])}")
        ends = end_tokens(self.hf.get("eos_token_id"), more)
        hf = {**self.hf, "eos_token_id": ends}
        if self.files and not hf.get("tie_word_embeddings") and (self.path / "modules.json").is_file():
            # A model of embeddings, published without its head; any stands in, since nothing asks for its tokens.
            hf["tie_word_embeddings"] = not any("lm_head.weight" in held for held in self._stored.values())
        return ModelConfig.from_hf(hf)

    @functools.cached_property
    def pooling(self) -> Pooling | None:
        """How the model makes embeddings or scores, if it is published for these. **Raises:** `CheckpointError`."""
        return pooling.read(self.config_file.parent, self.hf, str(self.path))

    def tensors(self, dequantised: Container[str] = ()) -> dict[str, TensorInfo]:
        """Tensors that the shards' headers list, with packed weights under common names, or unquantised if they are in
        `dequantised`.

        **Raises:** `CheckpointError` for a damaged file, an unusable dtype or an incomplete weight.
        """
        found = {name: info for held in self._stored.values() for name, info in held.items()}
        return found if self.packed is None else self.packed.tensors(found, self.path, self.orders, dequantised)

    @functools.cached_property
    def orders(self) -> dict[str, np.ndarray]:
        """By module, the order in which packed weights have their inputs, where it isn't that of rows."""
        if self.packed is None:
            return {}
        names = {name for held in self._stored.values() for name in held if name.endswith(packed.GROUPS)}
        return self.packed.orders(self.some(names))

    @functools.cached_property
    def _stored(self) -> dict[Path, dict[str, TensorInfo]]:
        """By file, the tensors that are read from it."""
        stored: dict[Path, dict[str, TensorInfo]] = {file: {} for file in self.files}
        strays = 0
        for file, held in stored.items():
            with open_shard(file) as shard:
                for name in shard.keys():  # noqa: SIM118 - a safe_open handle isn't a mapping
                    if self._index is None or self._index.get(name) == file.name:
                        held[name] = self._info(file, name, shard.get_slice(name))
                    else:
                        strays += name not in self._index
        if strays:
            log.warning(
                "%s: its index doesn't name %d of the tensors in its files; they are ignored", self.path, strays
            )
        lacking = [name for name, file in (self._index or {}).items() if name not in stored[self.path / file]]
        if lacking:
            where = self._index[lacking[0]]
            log.warning(
                "%s: its index names %d tensors that aren't in their files: %s isn't in %s",
                *(self.path, len(lacking), lacking[0], where),
            )
        return stored

    def _info(self, file: Path, name: str, view: Any) -> TensorInfo:
        shape, dtype = tuple(view.get_shape()), view.get_dtype()
        is_map = name.rpartition(".")[2] in _MAPS
        quantised = self.quantization is not None or self.packed is not None
        if dtype in (quantization.F8, quantization.U8) and not quantised and not is_map:
            raise CheckpointError(
                f"{file}: {name} is stored as {dtype}, and config.json has no quantization_config to say how its "
                "scales are kept; get the config.json that came with these weights"
            )
        more = dict.fromkeys(self.quantization.dtypes, 1) if self.quantization else {}
        more |= {"I32": 4, "I8": 1} if self.packed else {}
        known = _INTEGERS if is_map else _BYTES | more
        if (size := (_INDICES | known).get(dtype)) is None:
            raise CheckpointError(f"{file}: {name} is stored as {dtype}; supported: {', '.join(known)}")
        return TensorInfo(shape, size * int(np.prod(shape, dtype=np.int64)), dtype)

    def stored(self, dequantised: Container[str] = ()) -> dict[str, Stored | Computed]:
        """Every tensor that `tensors` lists, in the files' order, in the dtype it is stored in; dequantised weights in
        float32. Nothing is read for it."""
        if self.packed is None:
            return self._located
        return self.packed.stored(self._located, self.tensors(dequantised), dequantised)

    @functools.cached_property
    def _located(self) -> dict[str, Stored | Computed]:
        found: dict[str, Stored | Computed] = {}
        for file, held in self._stored.items():
            if file.suffix == ".bin":
                with open_shard(file) as shard:
                    there = shard.stored()
            else:
                there = _places(file, held)
            found |= {name: tensor for name, tensor in there.items() if name in held}
        return found

    def tensor(self, name: str) -> np.ndarray:
        """One of the tensors that `tensors` lists, as a host array in the dtype it is stored in."""
        return self._located[name].read()

    def some(self, names: Container[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Read only the tensors in `names`, as they are stored."""
        return ((name, tensor.read()) for name, tensor in self._located.items() if name in names)

    def tokenizer(self) -> Tokenizer | None:
        """The folder's tokenizer, or None if it has no vocabulary.

        **Raises:** `CheckpointError` for a damaged file of it, `TokenizerError` if it can't be read otherwise.
        """
        has_one = any(_named(self.path / name) for name in _VOCABULARIES)
        if not has_one:
            return None
        try:
            with unreadable_tokenizer(str(self.path)):
                return Tokenizer.from_folder(self.path)
        except TokenizerError:
            _check_tokenizer_files(self.path)  # which may know the cause better than what fell over it
            raise

    def image_reader(self, tokenizer: Tokenizer | None) -> ImageReader | None:
        """How the checkpoint takes pictures, or None if it has no vision or no tokenizer.

        **Raises:** `ConfigError` or `CheckpointError` for a damaged file.
        """
        files = (self.config_file.parent / name for name in PROCESSOR_FILES)
        return image_reader(self.hf, {file.name: read_json(file) for file in files if file.is_file()}, tokenizer)


@contextmanager
def unreadable_tokenizer(where: str) -> Iterator[None]:
    """Any failure to read a nonsensical tokenizer, as a `TokenizerError` of one line.

    A panic of the Rust library that reads it isn't an `Exception` in Python.
    """
    try:
        yield
    except TokenizerError as error:
        raise TokenizerError(" ".join(str(error).split())[:1000]) from error
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"{where}: can't read the tokenizer: {shown(error)}") from error


def _check_tokenizer_files(folder: Path) -> None:
    """**Raises:** `CheckpointError` naming a tokenizer's file that is damaged or that nothing here reads."""
    for name in _TOKENIZER_JSON:
        refuse_stand_in(file := folder / name)
        if not file.is_file():
            continue
        found = read_json(file)
        wanted = {"model": dict, "added_tokens": list} if name == "tokenizer.json" else {}
        for key, kind in wanted.items():
            if not isinstance(found.get(key), kind):
                what = "an object" if kind is dict else "a list"
                raise CheckpointError(f"{file} is no tokenizer: {key} must be {what}, got {shown(found.get(key))}")
    refuse_stand_in(file := folder / "tokenizer.model")
    if not file.is_file() or (folder / "tokenizer.json").is_file():
        return
    with file.open("rb") as opened:
        is_sentencepiece = opened.read(1) == b"\n"  # its first field; a file of tiktoken's is text
    needed = "sentencepiece", "google", "google.protobuf"
    if is_sentencepiece and any(importlib.util.find_spec(name) is None for name in needed):
        raise CheckpointError(
            f"{folder} has tokenizer.model and no tokenizer.json. Use a folder that has tokenizer.json, or let "
            "transformers convert it: pip install sentencepiece protobuf"
        )


@contextmanager
def open_shard(file: Path) -> Iterator[Any]:
    """A handle of a shard, as `safe_open` gives it. **Raises:** `CheckpointError` for a file that can't be read."""
    try:
        if file.suffix == ".bin":
            with BinFile(file) as shard:
                yield shard
            return
        with safe_open(file, framework="numpy") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size if file.exists() else 0
        raise CheckpointError(
            f"{file} ({size:,} bytes) is truncated or not a {file.suffix[1:]} file: {error}. Download it again"
        ) from error


def _places(file: Path, held: Mapping[str, TensorInfo]) -> dict[str, Stored]:
    """Where a shard has its tensors, in its order.

    It begins with the length of its header, 8 bytes, and the header, JSON; offsets in it count from its end.
    """
    with file.open("rb") as shard:
        start = 8 + int.from_bytes(shard.read(8), "little")
        header = json.loads(shard.read(start - 8))
    begins = {name: header[name]["data_offsets"][0] for name in held}
    return {
        name: Stored(file, start + begin, held[name].shape, DTYPES[held[name].dtype])
        for name, begin in sorted(begins.items(), key=lambda each: each[1])
    }


def find_shards(folder: Path) -> tuple[tuple[Path, ...], Mapping[str, str] | None]:
    """The weight files of a folder: those its index names, or `model.safetensors`, or its only safetensors file. A
    folder without safetensors may have `pytorch_model.bin`, or its index and shards. Beside them, what the index says:
    the name of the file that each tensor is read from.

    **Raises:** `CheckpointError` when there are none, when it is unclear which, or when one that the index names is
    missing.
    """
    for single in (_SAFETENSORS, _BIN):
        if (index := folder / f"{single}.index.json").is_file():
            return _indexed(index, folder)
        if _named(file := folder / single):
            return (file,), None
        if single == _SAFETENSORS and (files := sorted(folder.glob("*.safetensors"))):
            if len(files) == 1:
                return (files[0],), None
            raise CheckpointError(
                f"{folder} has {len(files)} safetensors files and no {index.name} to say which belong together. "
                "Download it"
            )
    if pickled := sorted(file.name for pattern in ("*.bin", "*.pth", "*.pt") for file in folder.glob(pattern)):
        raise CheckpointError(
            f"{folder} has no weights under a name that is read: model.safetensors or pytorch_model.bin, or an index "
            f"of either. It has {', '.join(pickled[:8])}; if that is a state dict that torch.save wrote, call it {_BIN}"
        )
    raise CheckpointError(
        f"{folder} has no weights: no *.safetensors file and no {_BIN}. For random weights, use --load-format dummy"
    )


def _named(file: Path) -> bool:
    """Whether the folder has an entry for the file, be it a link to nothing, which `refuse_stand_in` tells apart."""
    return file.is_file() or file.is_symlink()


def _indexed(index: Path, folder: Path) -> tuple[tuple[Path, ...], Mapping[str, str]]:
    """The files that an index names, which must lie beside it and be of its format, and its map."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; download it again")
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    for name in weight_map.values():
        if not isinstance(name, str) or not name.isprintable() or Path(name).name != name or not name.endswith(suffix):
            raise CheckpointError(f"{index}: weight_map must name {suffix} files beside it, got {shown(name)}")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    if missing := [file.name for file in files if not _named(file)]:
        raise CheckpointError(f"{index} names files that are not there: {', '.join(missing)}. Download them")
    return tuple(files), weight_map
