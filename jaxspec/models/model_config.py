"""Read a config.json into a `ModelConfig`: what a checkpoint computes. Frozen, static under jit, without an array."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.config.engine_config import DTYPES
from jaxspec.config.json_values import positive, shown
from jaxspec.config.options import ConfigError
from jaxspec.models.description import Decoder
from jaxspec.models.families import MODELS
from jaxspec.models.local import local
from jaxspec.models.memory import PagedRows, Recurrence
from jaxspec.models.rope_scaling import LinearScaling, Yarn
from jaxspec.models.vision import Tower


@dataclass(frozen=True)
class ModelConfig:
    """A model: what its decoder computes, and what its checkpoint says beside that."""

    model_type: str
    decoder: Decoder
    max_position: int
    mtp_layers: int = 0  # multi-token prediction modules that the checkpoint brings, by its config
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "bfloat16"  # what the checkpoint was saved in
    tower: Tower | None = None  # what it reads pictures with

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.decoder.width

    @property
    def num_layers(self) -> int:
        return len(self.decoder.layers)

    @property
    def num_heads(self) -> int:
        return self.decoder.attention.heads

    @property
    def num_kv_heads(self) -> int:
        return self.decoder.attention.memory.heads

    @property
    def head_dim(self) -> int:
        return self.decoder.attention.memory.width

    @property
    def recurrent(self) -> bool:
        """Whether some layer's past is a state of fixed size."""
        return self.decoder.recurrent

    @property
    def num_linear_layers(self) -> int:
        """Layers whose past is a state of fixed size."""
        return sum(self.decoder.groups(Recurrence).values())

    @property
    def num_kv_layers(self) -> int:
        """Layers whose past is rows of all tokens."""
        return sum(self.decoder.groups(PagedRows).values())

    def on_one_of(self, size: int) -> ModelConfig:
        """Config of one device's share among `size`. **Raises:** as `local`."""
        return dataclasses.replace(self, decoder=local(self.decoder, size)) if size > 1 else self

    def summary(self) -> dict[str, Any]:
        """Sizes and tokens, without the description of each layer."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("decoder", "tower")]
        names += [
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_linear_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        ]
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face `config.json` (as a mapping). Of a multimodal model, the text model is meant.

        **Raises:** `ConfigError` for a model family, activation, rope type or attention variant that isn't supported,
        or a missing or senseless size; the message names the key, its value and what is supported.
        """
        whole, hf = hf, _text_model(hf)
        model_type = hf.get("model_type")
        if not isinstance(model_type, str) or model_type not in MODELS:
            near = difflib.get_close_matches(str(model_type), MODELS, n=3)
            among = f", among them {', '.join(near)}" if near else ""
            raise ConfigError(
                f"model_type {shown(model_type)} is not supported; docs/models.md has the {len(MODELS)} that are{among}"
            )
        family = MODELS[model_type]
        hf = {**getattr(family, "DEFAULTS", {}), **hf}
        decoder = family.read(hf)
        eos = hf.get("eos_token_id")
        eos = eos if isinstance(eos, list | tuple) else [] if eos is None else [eos]
        if bad := [token for token in eos if not is_token(token)]:
            raise ConfigError(f"config.json: eos_token_id must be token ids, got {shown(bad[0])}")
        if (bos := hf.get("bos_token_id")) is not None and not is_token(bos):
            raise ConfigError(f"config.json: bos_token_id must be a token id, got {shown(bos)}")
        return cls(
            model_type=model_type,
            decoder=decoder,
            max_position=_longest(decoder, _positions(hf)),
            mtp_layers=_mtp_layers(hf),
            eos_token_ids=tuple(eos),
            bos_token_id=bos,
            dtype=_dtype(hf),
            tower=family.tower(whole, decoder.width) if hasattr(family, "tower") else None,
        )


def end_tokens(*ends: Any) -> list[Any]:
    """Several `eos_token_id`s, each a number, a list or None, as one list without doubles."""
    flat = [token for end in ends for token in (end if isinstance(end, list | tuple) else [end]) if token is not None]
    return [token for i, token in enumerate(flat) if token not in flat[:i]]  # not hashed: they may be anything


def is_token(token: Any) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31


def _text_model(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a multimodal config, under the model type that it has alone.

    End tokens of both count, tying is the outer config's to say, if it does, and the dtype if the text's doesn't.
    """
    text = hf.get("text_config")
    if isinstance(text, Mapping):
        flat = end_tokens(hf.get("eos_token_id"), text.get("eos_token_id"))
        names = ("dtype", "torch_dtype")
        own = {"dtype": next((c[n] for c in (text, hf) for n in names if c.get(n)), None), "eos_token_id": flat}
        own |= {key: hf[key] for key in ("tie_word_embeddings",) if key in hf}
        hf = {**text, **own}
    if isinstance(kind := hf.get("model_type"), str):
        hf = {**hf, "model_type": kind.removesuffix("_text")}
    return hf


def _positions(hf: Mapping[str, Any]) -> int:
    """The most positions; Kimi Linear's configs call them `model_max_length`."""
    return positive(hf, "max_position_embeddings", positive(hf, "model_max_length", 2048))


def _longest(decoder: Decoder, positions: int) -> int:
    """The most positions, of a config whose rope scaling a user may have added without raising `positions`.

    Where each kind of layer has a rope of its own, as in Gemma 3, `positions` count the scaling already.
    """
    if len(decoder.ropes) != 1:
        return positions
    match decoder.ropes[0].scaling:
        case Yarn(factor, original):
            return max(positions, int(factor * original))
        case LinearScaling(factor):
            return int(factor * positions)
    return positions


def _mtp_layers(hf: Mapping[str, Any]) -> int:
    """Under whichever name the config counts multi-token prediction modules."""
    names = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
    return next((positive(hf, name) for name in names if hf.get(name)), 0)


def _dtype(hf: Mapping[str, Any]) -> str:
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(f"config.json: dtype {shown(dtype)} is not supported; supported: {', '.join(DTYPES)}")
    return dtype
