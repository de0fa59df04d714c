"""A single-file GGUF model: its config, tensors and tokenizer, presented as a Hugging Face checkpoint would be.

Tensors leave this module with the names, shapes and row order of the safetensors checkpoint that the file was made
from. So nothing after it knows where the weights came from.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Container, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxspec.checkpoint import pooling
from jaxspec.checkpoint.check import CheckpointError, TensorInfo
from jaxspec.checkpoint.gguf import packing
from jaxspec.checkpoint.gguf import tokenizer as gguf_tokenizer
from jaxspec.checkpoint.gguf.architectures import ARCHITECTURES, GATING, LAYER, MIXTRAL, TOP
from jaxspec.checkpoint.gguf.header import GgufTensor, read_header
from jaxspec.checkpoint.packed import GGUF, Packed
from jaxspec.checkpoint.pooling import Pooling
from jaxspec.checkpoint.quantization import beside
from jaxspec.checkpoint.stored import Computed, Shared, Stored
from jaxspec.config.json_values import shown
from jaxspec.config.options import ConfigError
from jaxspec.decoder.functions import rope_frequencies
from jaxspec.models.model_config import ModelConfig, end_tokens
from jaxspec.text.tokenizer import Tokenizer

_ROPE_FACTORS = "rope_freqs.weight"
# What llama.cpp takes for Gemma 3 where the metadata is silent: every sixth layer sees all of the text, and only the
# 27B, known by its layers, scales queries by the model's width a head.
_GEMMA3_PATTERN, _GEMMA3_27B_LAYERS = 6, 62
# What llama.cpp's converter assumes of llama3 rope scaling, beside the factor itself.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GgufFile:
    """A GGUF file whose header and config have been read, not its weights."""

    def __init__(self, path: Path):
        """**Raises:** `CheckpointError` or `ConfigError` for a damaged file, or an architecture, variant or rope
        scaling that isn't supported."""
        self.path = path
        self._metadata, self._places = read_header(path)
        self._architecture = self._metadata.get("general.architecture")
        if not isinstance(self._architecture, str) or self._architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{path}: architecture {shown(self._architecture)} is not supported in GGUF files; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )
        self._stored = ARCHITECTURES[self._architecture]
        if self._architecture == "llama" and self._value("expert_count", 0):
            self._stored = MIXTRAL
        if (parts := self._metadata.get("split.count", 0)) not in (0, 1):
            raise CheckpointError(f"{path} is one of {shown(parts)} parts; join them with llama-gguf-split --merge")
        try:
            self.config = self._read_config()
        except ConfigError as error:
            raise ConfigError(f"{path}: its metadata, under a config.json's names: {error}") from error
        self._four, self.why_unpacked = packing.fitting(dict(self._named()))
        self.packed = self.packed_on_gpu() if packing.kernels_here() else None
        self.quantization = self.packed and self.packed.quantization
        self.generation: dict[str, Any] = {}  # newer files may say how to sample; that is not read

    @property
    def pooling(self) -> Pooling | None:
        """How the model makes scores, by its name: a file says nothing of pooling."""
        return pooling.read(self.path, {}, self.path.name)

    def packed_on_gpu(self) -> Packed | None:
        """How weights are packed on a GPU; None if they are all dequantised, as on a CPU."""
        if not self._four:
            return None
        others = (name.removesuffix(".weight") for name, _ in self._named() if name not in self._four)
        return Packed(GGUF, 4, packing.GROUP, kept=tuple(others))

    def tensors(self, dequantised: Container[str] = ()) -> dict[str, TensorInfo]:
        """Tensors that the header lists, under Hugging Face names; a name with no counterpart there stays as it is.
        Weights that stay in four bits have `checkpoint.packed`'s; those in `dequantised` don't stay so."""
        listed = {}
        for name, tensor in self._named():
            if not self._stays(name, dequantised):
                listed[name] = TensorInfo(tensor.shape, tensor.nbytes)
                continue
            listed |= packing.listed(name, tensor)
        for name, parts in self._alternating():
            count, outputs, *inputs = parts[0].shape
            shape = (count, *inputs, len(parts) * outputs)
            listed[name] = TensorInfo(shape, sum(part.nbytes for part in parts))
        return listed

    def stored(self, dequantised: Container[str] = ()) -> dict[str, Computed]:
        """Every tensor of `tensors`, in the file's order. Those that don't stay packed are dequantised to float32 when
        they are read.

        **Raises:** then `CheckpointError` for a type that the gguf package can't dequantise.
        """
        found = {}
        for name, tensor in sorted(self._named(), key=lambda each: each[1].offset):
            if self._stays(name, dequantised):
                weight = Shared(partial(self._packed, tensor))
                for part in ("weight", "weight_scale"):
                    found[beside(name, part)] = Computed(2 * tensor.nbytes, partial(weight.take, part))
                continue
            found[name] = Computed(tensor.nbytes + 4 * math.prod(tensor.shape), partial(self._values, tensor))
        for name, parts in self._alternating():
            size = sum(part.nbytes + 8 * math.prod(part.shape) for part in parts)
            found[name] = Computed(size, partial(self._alternated, parts))
        return found

    def _stays(self, name: str, dequantised: Container[str]) -> bool:
        """Whether a tensor is listed, and read, in four bits."""
        return self.packed is not None and name in self._four and name not in dequantised

    def _alternating(self) -> Iterator[tuple[str, list[GgufTensor]]]:
        """Tensors that are made of several of the file's, by their Hugging Face names."""
        for layer in range(self.config.num_layers):
            for name, parts in self._stored.alternating.items():
                names = [f"blk.{layer}.{part}" for part in parts]
                if all(each in self._places for each in names):
                    yield f"model.layers.{layer}.{name}", [self._places[each] for each in names]

    def _alternated(self, parts: list[GgufTensor]) -> np.ndarray:
        values = [np.moveaxis(self._dequantize(part), 1, -1) for part in parts]
        return np.stack(values, axis=-1).reshape(*values[0].shape[:-1], -1)

    def _named(self) -> Iterator[tuple[str, GgufTensor]]:
        """Tensors by their Hugging Face names, each expert's part of a tensor by itself."""
        apart = {part for parts in self._stored.alternating.values() for part in parts}
        for name, tensor in self._weights().items():
            if name.split(".", 2)[-1] in apart:
                continue
            named = self._hf_name(name)
            if "{}" not in named:
                yield named, tensor
                continue
            count = tensor.shape[0]
            each = dataclasses.replace(tensor, shape=tensor.shape[1:], nbytes=tensor.nbytes // count)
            for i in range(count):
                yield named.format(i), dataclasses.replace(each, offset=tensor.offset + i * each.nbytes)

    def _packed(self, tensor: GgufTensor) -> dict[str, np.ndarray]:
        made = packing.unpacked(self._read(tensor), tensor.type)
        return {part: self._ordered(tensor, rows) for part, rows in made.items()}

    def _ordered(self, tensor: GgufTensor, rows: np.ndarray) -> np.ndarray:
        """A tensor's rows, those of q and k in the order of the checkpoint."""
        if self._stored.interleaved and (match := re.fullmatch(r"blk\.\d+\.attn_([qk])\..*", tensor.name)):
            return _half_split(rows, self.config.num_heads if match[1] == "q" else self.config.num_kv_heads)
        return rows

    def _values(self, tensor: GgufTensor) -> np.ndarray:
        values = self._ordered(tensor, self._dequantize(tensor))
        if self._stored.centred and tensor.name.endswith("norm.weight"):
            values = values - 1
        return values

    def tokenizer(self) -> Tokenizer | None:
        """**Raises:** `TokenizerError` for a tokenizer that can't be rebuilt."""
        return gguf_tokenizer.build(self._metadata, str(self.path))

    def _hf_name(self, name: str) -> str:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. A tensor of all experts has a place in its
        name for an expert's number."""
        if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias|scale)", name):
            layer, part, kind = match.groups()
            if whole := self._stored.names.get(f"{part}.{kind}"):
                return f"model.layers.{layer}.{whole}"
            known = self._stored.names.get(part) or LAYER.get(part)
            return f"model.layers.{layer}.{known}.{kind}" if known else name
        part, _, kind = name.rpartition(".")
        return f"{TOP[part]}.{kind}" if part in TOP else name

    def _weights(self) -> dict[str, GgufTensor]:
        layer = lambda name: int(found[1]) if (found := re.match(r"blk\.(\d+)\.", name)) else -1  # noqa: E731
        return {
            name: tensor
            for name, tensor in self._places.items()
            if name != _ROPE_FACTORS and layer(name) < self.config.num_layers
        }

    def _read(self, tensor: GgufTensor) -> np.ndarray:
        return Stored(self.path, tensor.offset, tensor.byte_shape, np.dtype(np.uint8)).read()

    def _dequantize(self, tensor: GgufTensor) -> np.ndarray:
        try:
            return gguf.dequantize(self._read(tensor), tensor.type)
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(f"{self.path}: tensor {tensor.name} is {tensor.type.name}: {error}") from error

    def _value(self, key: str, default: Any = None) -> Any:
        """Metadata of the architecture: `_value("block_count")` is `llama.block_count`."""
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        if value is None:
            raise CheckpointError(f"{self.path}: the metadata lacks {self._architecture}.{key}")
        return value

    def _count(self, key: str, default: int | None = None) -> int:
        """Metadata, read by `_value`, that must be a positive integer, the same for every layer."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise CheckpointError(
                f"{self.path}: {self._architecture}.{key} must be an integer from 1 to {2**31 - 1}, got {shown(value)}"
            )
        return value

    def _read_config(self) -> ModelConfig:
        self._refuse_variants()
        heads = self._count("attention.head_count")
        vocab = self._metadata.get("tokenizer.ggml.tokens", ())
        vocab = vocab if isinstance(vocab, list) else ()
        ends = [self._metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
        embedding = self._places.get("token_embd.weight")
        hf = {
            "model_type": self._stored.family or self._architecture,
            "vocab_size": embedding.shape[0] if embedding else self._value("vocab_size", len(vocab)),
            "hidden_size": self._value("embedding_length"),
            "intermediate_size": self._feed_width(),
            "num_hidden_layers": self._count("block_count") - self._modules(),
            "num_attention_heads": heads,
            "num_key_value_heads": None if self._stored.own_ropes else self._count("attention.head_count_kv", heads),
            "head_dim": self._count("attention.key_length", self._count("embedding_length") // heads),
            "rms_norm_eps": self._value("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._value("rope.freq_base", 10_000.0),
            "max_position_embeddings": self._value("context_length"),
            "tie_word_embeddings": "output.weight" not in self._places,
            "attention_bias": "blk.0.attn_q.bias" in self._places,
            "mlp_bias": "blk.0.ffn_up.bias" in self._places,
            "eos_token_id": end_tokens(*ends),
            "bos_token_id": self._metadata.get("tokenizer.ggml.bos_token_id"),
            "dtype": {"F32": "float32", "F16": "float16"}.get(embedding.type.name if embedding else "", "bfloat16"),
            "rope_scaling": self._rope_scaling(),
        }
        if self._architecture == "gemma3":
            hf |= self._gemma3(hf)
        if self._architecture == "gemma4":
            return ModelConfig.from_hf(hf | self._gemma4(hf))
        if self._stored.experts:
            hf |= self._experts()
        if self._stored.partial:
            hf["rotary_dim"] = self._count("rope.dimension_count", hf["head_dim"])
            hf["partial_rotary_factor"] = self._count("rope.dimension_count", hf["head_dim"]) / hf["head_dim"]
        return self._with_rope_factors(hf) if _ROPE_FACTORS in self._places else ModelConfig.from_hf(hf)

    def _modules(self) -> int:
        """How many of the layers are MTP modules. Newer files have them behind the model's own."""
        return self._value("nextn_predict_layers", 0) if self._stored.experts else 0

    def _experts(self) -> dict[str, Any]:
        """Keys of experts, under the names of the families that have some."""
        experts = self._count("expert_count")
        width = self._count("expert_feed_forward_length", self._feed_width())
        own = {
            "num_experts_per_tok": self._count("expert_used_count"),
            "moe_intermediate_size": width,
            "norm_topk_prob": self._value("expert_weights_norm", True),
            "n_shared_experts": self._value("expert_shared_count", 0),
            "first_k_dense_replace": self._value("leading_dense_block_count", 0),
            "routed_scaling_factor": self._value("expert_weights_scale", 1.0) or 1.0,
            "n_group": self._count("expert_group_count", 1),
            "topk_group": self._count("expert_group_used_count", 1),
            "use_qk_norm": "blk.0.attn_q_norm.weight" in self._places,
        }
        match self._architecture:
            case "qwen3moe":
                return own | {"num_experts": experts, "norm_topk_prob": True}  # whatever the file says, as llama.cpp
            case "gpt-oss":
                return own | {
                    "num_local_experts": experts,
                    "intermediate_size": width,
                    "sliding_window": self._count("attention.sliding_window"),
                    "rope_parameters": {"truncate": False} if self._rope_scaling() else {},
                }
            case "minimax-m2" | "llama":
                return own | {"num_local_experts": experts, "intermediate_size": width}
        return own | {"n_routed_experts": experts}

    def _gemma3(self, hf: dict[str, Any]) -> dict[str, Any]:
        """Gemma 3's own keys. Without a window in the metadata no layer has one."""
        layers, window = self._count("block_count"), self._value("attention.sliding_window", 0)
        slides = self._value("attention.sliding_window_pattern", _GEMMA3_PATTERN)
        if not isinstance(slides, list):  # which says it of each layer
            pattern = self._count("attention.sliding_window_pattern", _GEMMA3_PATTERN)
            slides = [bool((i + 1) % pattern) for i in range(layers)]
        width = hf["head_dim"]
        if layers == _GEMMA3_27B_LAYERS:
            width = self._count("embedding_length") // hf["num_attention_heads"]
        own = {
            "layer_types": [("full_attention", "sliding_attention")[bool(window and each)] for each in slides],
            "query_pre_attn_scalar": width,
            "rope_theta": self._value("rope.freq_base", 1_000_000.0),
            "rope_local_base_freq": self._value("rope.freq_base_swa", 10_000.0),
            "final_logit_softcapping": self._metadata.get("gemma3.final_logit_softcapping"),
        }
        return own | ({"sliding_window": window} if window else {})

    def _feed_width(self) -> Any:
        """Width of an MLP. Gemma 4's last ones may be twice as wide, and are listed: see `_gemma4`."""
        width = self._value("feed_forward_length")
        return min(width) if self._stored.own_ropes and isinstance(width, list) and width else width

    def _gemma4(self, hf: dict[str, Any]) -> dict[str, Any]:
        """Gemma 4's own keys. **Raises:** `CheckpointError` for layers that differ in another way than its own do."""
        layers, sharing = hf["num_hidden_layers"], self._value("attention.shared_kv_layers", 0)
        slides = self._by_layer("attention.sliding_window_pattern", layers)
        heads, widths = (self._by_layer(key, layers) for key in ("attention.head_count_kv", "feed_forward_length"))
        kv_heads = {bool(each): count for each, count in zip(slides, heads, strict=True)}
        narrow, full = hf["intermediate_size"], slides.index(False) if False in slides else layers - 1
        wide = [width != narrow for width in widths]
        if (
            [kv_heads[bool(each)] for each in slides] != heads
            or any(width not in (narrow, 2 * narrow) for width in widths)
            or wide not in ([False] * layers, [i >= layers - sharing for i in range(layers)])
        ):
            raise CheckpointError(
                f"{self.path}: layers differ in a way that Gemma 4's don't: gemma4.attention.head_count_kv is "
                f"{shown(heads)}, gemma4.feed_forward_length {shown(widths)}"
            )
        width = self._count("attention.key_length")
        experts, inputs = self._value("expert_count", 0), self._places.get("per_layer_token_embd.weight")
        return {
            "head_dim": self._count("attention.key_length_swa", width),
            "global_head_dim": width,
            "num_key_value_heads": kv_heads.get(True, kv_heads.get(False)),
            "num_global_key_value_heads": kv_heads.get(False),
            "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in self._places,
            "layer_types": [("full_attention", "sliding_attention")[bool(each)] for each in slides],
            "sliding_window": self._count("attention.sliding_window"),
            "num_kv_shared_layers": sharing,
            "use_double_wide_mlp": any(wide),
            "hidden_size_per_layer_input": self._value("embedding_length_per_layer_input", 0),
            "vocab_size_per_layer_input": inputs.shape[0] if inputs else hf["vocab_size"],
            "final_logit_softcapping": self._metadata.get("gemma4.final_logit_softcapping"),
            "rope_parameters": {
                "sliding_attention": {"rope_theta": self._value("rope.freq_base_swa", 1e4)},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": self._value("rope.freq_base", 1e6),
                    "partial_rotary_factor": self._rotating(width),
                },
            },
            "enable_moe_block": bool(experts),
            "num_experts": experts,
            "top_k_experts": self._value("expert_used_count", 0),
            "moe_intermediate_size": self._value("expert_feed_forward_length", 0),
        }

    def _by_layer(self, key: str, layers: int) -> list[Any]:
        """Metadata that is a list of each layer's, or one for all."""
        value = self._value(key)
        value = value if isinstance(value, list) else [value] * layers
        if len(value) != layers:
            raise CheckpointError(
                f"{self.path}: gemma4.{key} must have a value for each of {layers} layers, got {shown(value)}"
            )
        return value

    def _rotating(self, width: int) -> float:
        """The part of wide heads' pairs that rotates: those whose frequency isn't divided by next to infinity."""
        if _ROPE_FACTORS not in self._places:
            return 1.0
        divisors = self._dequantize(self._places[_ROPE_FACTORS])
        pairs = int((divisors == 1).sum())
        if (
            divisors.shape != (width // 2,)
            or not pairs
            or not (divisors[:pairs] == 1).all()
            or not (divisors[pairs:] > 1e20).all()
        ):
            raise CheckpointError(
                f"{self.path}: tensor {_ROPE_FACTORS} must have {width // 2} numbers, ones and then 1e30, as Gemma 4's "
                "has; use the model's safetensors folder instead"
            )
        return 2 * pairs / width

    def _refuse_variants(self) -> None:
        """Variants that share an architecture's name but not its forward."""
        if not self._stored.experts and (experts := self._value("expert_count", 0)):
            mixtures = ", ".join(name for name, each in ARCHITECTURES.items() if each.experts)
            raise CheckpointError(
                f"{self.path}: {self._architecture} with {shown(experts)} experts is not supported; architectures with "
                f"experts that are: {mixtures}"
            )
        gating = self._value("expert_gating_func", 0)
        if gating not in (0, known := GATING.get(self._architecture, 0)):
            raise CheckpointError(
                f"{self.path}: {self._architecture}.expert_gating_func {shown(gating)} is not supported; supported: "
                f"{known}"
            )
        if self._value("rope.dimension_sections", ()):
            raise CheckpointError(
                f"{self.path}: rotary positions in sections ({self._architecture}.rope.dimension_sections), as of a "
                "model of text and images, are not supported"
            )
        if not self._stored.experts and (more := self._value("nextn_predict_layers", 0)):
            raise CheckpointError(
                f"{self.path}: {shown(more)} layers that predict further tokens "
                f"({self._architecture}.nextn_predict_layers) are not supported"
            )
        # What llama.cpp multiplies YaRN's frequencies and logits by, beyond what a config.json can say.
        for key, plain in (("attn_factor", 1), ("yarn_ext_factor", 1), ("yarn_log_multiplier", 0)):
            if (found := self._value(f"rope.scaling.{key}", plain)) != plain:
                raise CheckpointError(
                    f"{self.path}: {self._architecture}.rope.scaling.{key} {shown(found)} is not supported; "
                    f"supported: {plain}. Use the model's safetensors folder instead"
                )
        width = self._count("embedding_length") // self._count("attention.head_count")
        width = self._count("attention.key_length", width)
        for key in ("attention.value_length", *(() if self._stored.partial else ("rope.dimension_count",))):
            if (found := self._value(key, width)) != width:
                raise CheckpointError(
                    f"{self.path}: {self._architecture}.{key} must be the head width {width}, got {shown(found)}"
                )

    def _rope_scaling(self) -> dict[str, Any] | None:
        """A config.json's `rope_scaling`, as llama.cpp's converter wrote it down; None: positions aren't scaled.

        Llama 3's scaling isn't among the metadata: see `_with_rope_factors`.
        """
        factor = self._value("rope.scaling.factor", self._value("rope.scale_linear", 0))  # the latter in old files
        kind = self._value("rope.scaling.type", "linear" if factor else "none")  # as llama.cpp takes a lone factor
        if kind == "none":
            return None
        keys = {
            "original_max_position_embeddings": "original_context_length",
            "attention_factor": "yarn_attn_factor",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        given = {name: self._metadata.get(f"{self._architecture}.rope.scaling.{key}") for name, key in keys.items()}
        return {"rope_type": kind, "factor": factor or 1.0, **given}

    def _with_rope_factors(self, hf: dict[str, Any]) -> ModelConfig:
        """llama3 rope scaling, which the file stores only as the divisor of every frequency: find the parameters that
        give those divisors, and make sure that they do."""
        if hf["rope_scaling"]:
            raise CheckpointError(
                f"{self.path} scales rotary positions twice: by {self._architecture}.rope.scaling and by the tensor "
                f"{_ROPE_FACTORS}; use the model's safetensors folder instead"
            )
        divisors = self._dequantize(self._places[_ROPE_FACTORS])
        if not (np.isfinite(divisors).all() and (divisors > 0).all()):
            raise CheckpointError(f"{self.path}: tensor {_ROPE_FACTORS} must hold positive numbers")
        plain = np.asarray(rope_frequencies(ModelConfig.from_hf(hf).decoder.attention))
        scaling = {"rope_type": "llama3", "rope_theta": hf["rope_theta"], "factor": float(divisors.max()), **_LLAMA3}
        config = ModelConfig.from_hf({**hf, "rope_parameters": scaling})
        scaled = np.asarray(rope_frequencies(config.decoder.attention))
        if divisors.shape != plain.shape or not np.allclose(plain / divisors, scaled, rtol=1e-3, atol=0):
            raise CheckpointError(
                f"{self.path}: tensor {_ROPE_FACTORS} scales the rotary frequencies in a way that isn't Llama 3's "
                f"(factor {divisors.max():g}, {_LLAMA3}); use the model's safetensors folder instead"
            )
        return config


def _half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from interleaved rotary pairs (x0 y0 x1 y1 ...) to halves (x0 x1 ... y0 y1 ...), head by head."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
