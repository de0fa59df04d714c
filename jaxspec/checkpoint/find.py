"""Where a model is: the demo, a GGUF file, a folder, a config alone, or a hub id that is fetched into the hub's cache.

A file or folder on disk wins over a hub id of the same name. Nothing is downloaded that the load format doesn't need.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors

from jaxspec.checkpoint import demo, pooling
from jaxspec.checkpoint.check import CheckpointError, refuse_stand_in
from jaxspec.checkpoint.gguf.file import GgufFile
from jaxspec.checkpoint.shards import ModelFolder
from jaxspec.models.model_config import ModelConfig

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SMALL_FILES = ["config.json", "generation_config.json", "tokenizer*", "vocab.json", "merges.txt",
                "special_tokens_map.json", "added_tokens.json", "chat_template*",
                "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
                *pooling.FILES]  # fmt: skip
_SAFETENSORS = ["*.safetensors", "*.safetensors.index.json"]
_BIN = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]  # fetched only if there are no safetensors
_OTHER_WEIGHTS = ["consolidated*", "*/*.safetensors*", "*/*.bin*"]  # the same weights again, in another layout


@dataclass(frozen=True, eq=False)
class Source:
    """A model found and its config read, but no weights yet.

    `files` gives `tensors()` (name -> `TensorInfo`, from headers), `read()` (the tensors one by one), `tokenizer()` and
    `generation`, what a generation_config.json says.
    """

    name: str
    path: str
    config: ModelConfig
    files: ModelFolder | GgufFile


def resolve(path_or_id: str, revision: str | None = None, *, load_format: str = "auto") -> Source:
    """Find a model, downloading it if it is the demo or a hub id.

    **Arguments:**

    - `path_or_id`: `smollm2-135m-instruct`; a folder with config.json and weights (safetensors, else
      pytorch_model.bin), or with one GGUF file; a `.gguf` file; a hub id `org/name`. With `load_format="dummy"` a
      config.json, or a folder that holds one, is enough.
    - `revision`: branch, tag or commit of a hub id.

    **Raises:** `CheckpointError` (what was tried, what to do); `ConfigError` for a model that isn't supported.
    """
    files = locate(path_or_id, revision, load_format=load_format)
    return Source(str(path_or_id), str(files.path), files.config, files)


def locate(path_or_id: str, revision: str | None = None, *, load_format: str = "auto") -> ModelFolder | GgufFile:
    """Find a model as `resolve` does, but take any config: a drafter's often isn't a target model's."""
    name = str(path_or_id)
    if not name.strip():
        raise CheckpointError(f"the model's name is empty; give a hub id (org/name), a folder or {demo.NAME}")
    weights = load_format != "dummy"
    path = Path(name).expanduser()
    if revision is not None and (path.exists() or not _HUB_ID.fullmatch(name)):
        raise CheckpointError(f"revision {revision!r} applies to hub ids only, and {name} isn't one")
    if name == demo.NAME and not path.exists():
        return GgufFile(demo.fetch())
    if path.is_file():
        return _file(path, weights)
    if path.is_dir():
        return _folder(path, weights)
    if _is_hub_id(name):
        return _folder(_download(name, revision, weights), weights)
    raise CheckpointError(_unknown(name))


def may_be_model(name: str) -> bool:
    """Whether there is a file or folder of this name, or it could be the demo's or a hub id."""
    return Path(name).expanduser().exists() or name == demo.NAME or _is_hub_id(name)


def _is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not name.startswith(".") and not name.endswith(".gguf")


def _file(path: Path, weights: bool) -> ModelFolder | GgufFile:
    if path.suffix == ".gguf":
        return GgufFile(path)
    if path.name.endswith(".json") and not weights:
        return ModelFolder(path.parent, path, weights=False)
    hint = "for random weights from a config, add --load-format dummy" if path.suffix == ".json" else "give its folder"
    raise CheckpointError(f"{path} is a file, but not a .gguf file; {hint}")


def _folder(path: Path, weights: bool) -> ModelFolder | GgufFile:
    config, ggufs = path / "config.json", sorted(path.glob("*.gguf"))
    if ggufs and not any(path.glob("*.safetensors")):
        if len(ggufs) > 1:
            names = ", ".join(file.name for file in ggufs[:8])
            raise CheckpointError(f"{path} has {len(ggufs)} GGUF files ({names}); give the path of one")
        return GgufFile(ggufs[0])
    refuse_stand_in(config)
    if not config.is_file():
        inside = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
        raise CheckpointError(f"{path} has no config.json, so it isn't a model folder; it holds: {inside}")
    return ModelFolder(path, config, weights)


def _download(name: str, revision: str | None, weights: bool) -> Path:
    """A hub model's files in the hub's own cache, with its progress bars."""

    def fetch(patterns: list[str]) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=patterns, ignore_patterns=_OTHER_WEIGHTS
            )
        )

    try:
        if not weights:
            return fetch(_SMALL_FILES)
        path = fetch([*_SMALL_FILES, *_SAFETENSORS])
        return path if any(path.glob("*.safetensors")) else fetch([*_SMALL_FILES, *_BIN])
    except errors.GatedRepoError as error:  # before RepositoryNotFoundError, whose subclass it is
        problem = "it is gated: accept its terms on its page, then log in with `hf auth login`"
        raise CheckpointError(f"can't fetch {name}: {problem}") from error
    except errors.RepositoryNotFoundError as error:
        problem = "the hub has no such model, or it is private: check the name, or log in with `hf auth login`"
        raise CheckpointError(f"can't fetch {name}: {problem}") from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"can't fetch {name}: it has no revision {revision!r}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"can't fetch {name}: no such file or folder here, not in the hub's cache, and the hub can't be reached "
            f"({_first_line(error)}). Check the connection (and that HF_HUB_OFFLINE is unset), or give a local folder "
            f"or .gguf file; `{demo.NAME}` needs no hub"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise CheckpointError(
            f"can't fetch {name}: {_first_line(error)}. Check the name and the disk's space, or give a local folder"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), [demo.NAME], n=1)
    hint = f"did you mean {near[0]}?" if near else "give a hub id (org/name), a folder, a .gguf file, or " + demo.NAME
    return f"no model {name!r}: no such file or folder, and not a hub id; {hint}"
