"""Make the Qwen3.8-Flash-Next models of tests/golden/hybrid, in the files that make_hybrid.py describes.

    torch-venv/bin/python tests/golden/make_qwen4_exp.py

The indexer's budget is small, so that it binds within a few tokens. transformers reads no MTP module of this family.
Here it is one layer of the model's, between what vLLM (`models/qwen4_exp/nvidia/mtp.py`), SGLang (`qwen4_exp_mtp.py`)
and ATOM put around it. One of the models has it.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys

import numpy as np
import torch
from make_hybrid import CHAINS, DRAFTS, EXPERTS, GREEDY, HERE, LENGTH, MROPE, PROMPTS, SIZES, VOCAB, one_by_one
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpTextDecoderLayer,
    Qwen4ExpTextGatedResidual,
    Qwen4ExpTextRMSNorm,
)

OWN = dict(
    hc_count=3,
    hc_lowrank=10,
    ple_layer_ids=[2],
    ple_embed_dim=24,
    ple_conv_kernel_size=3,
    ngram_size=3,
    heads_per_ngram=2,
    ngram_vocab_size_base=50,
    make_ngram_vocab_size_divisible_by=8,
    split_ngram_parts=4,
    seed=77,
    indexer_n_heads=12,  # so that few blocks have a score of zero, of which transformers takes any
    indexer_kv_heads=1,
    indexer_head_dim=10,
    indexer_budget=16,
    indexer_compress_ratio=4,
    output_gate_type="sigmoid",
    eos_token_id=1,
)
LINEAR, FULL = "linear_attention", "full_attention"
VARIANTS = {
    "qwen4_exp": dict(num_hidden_layers=4, layer_types=[LINEAR, LINEAR, FULL, FULL]),
    "qwen4_exp-text-tied": dict(
        num_hidden_layers=3, layer_types=[LINEAR, FULL, LINEAR], ple_layer_ids=[1, 3], hc_count=2, ngram_size=4,
        heads_per_ngram=1, ple_conv_kernel_size=2, indexer_budget=15, indexer_compress_ratio=3, output_gate_type=None,
        tie_word_embeddings=True, norm_topk_prob=False, eos_token_id=[5, 1], split_ngram_parts=2,
    ),
}  # fmt: skip


def randomise(model: torch.nn.Module, tied: bool) -> None:
    """Draw every parameter, to what bfloat16 holds. A fresh model's convolution of n-grams is zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if name.endswith("linear_attn.norm.weight"):
                noise = 1 + 0.3 * noise
            elif parameter.ndim == 1:
                noise = 0.3 * noise - (2.0 if name.endswith(("A_log", "dt_bias")) else 0.0)
            elif "embed_tokens" in name:
                noise = noise * (0.3 if tied else 1.0)
            elif "ngram_embedding" not in name:
                noise = noise * parameter.shape[-1] ** -0.5
            parameter.copy_(noise.bfloat16())


class Mtp(nn.Module):
    """A module of a model, of one layer with indexed attention. One norm is over all streams at once."""

    def __init__(self, model: Qwen4ExpForCausalLM):
        super().__init__()
        config, (d, eps) = copy.deepcopy(model.config), (model.config.hidden_size, model.config.rms_norm_eps)
        config.layer_types, config.ple_layer_ids = ["indexed_attention"], []
        self.pre_fc_norm_embedding = Qwen4ExpTextRMSNorm(d, eps=eps)
        self.pre_fc_norm_hidden = Qwen4ExpTextRMSNorm(config.hc_count * d, eps=eps)
        self.fc_embedding, self.fc_hidden = (nn.Linear(d, d, bias=False) for _ in range(2))
        self.layers = nn.ModuleList([Qwen4ExpTextDecoderLayer(config, 0)])
        self.hyper_connection_mixer = Qwen4ExpTextGatedResidual(config, use_combine=False)
        self.model = [model.model]  # not its own

    def forward(self, streams: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The streams [1, t, s d] behind the layer, of the model's and the tokens after them."""
        (model,), t = self.model, streams.shape[1]
        added = self.fc_embedding(self.pre_fc_norm_embedding(model.embed_tokens(tokens[None])))
        hidden = self.pre_fc_norm_hidden(streams).unflatten(-1, (-1, added.shape[-1]))
        x = (self.fc_hidden(hidden) + added[:, :, None]).flatten(-2)
        ropes = model.rotary_emb(x, torch.arange(t).expand(3, 1, t))
        mask = torch.full((t, t), torch.finfo(torch.float32).min).triu(1)
        return self.layers[0](x, position_embeddings=ropes, attention_mask=mask[None, None])


def chain(model: Qwen4ExpForCausalLM, mtp: Mtp, ids: torch.Tensor) -> tuple[int, list[int], list[np.ndarray]]:
    """The target's next token, and drafts after it: the module goes on from its own streams."""
    kept = []
    hook = model.model.hyper_connection_mixer.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    following = int(model(ids[None], use_cache=False).logits[0, -1].argmax())
    hook.remove()
    (streams,), tokens, drafts, logits = kept, [*ids[1:].tolist(), following], [], []
    for _ in range(DRAFTS):
        out = mtp(streams, torch.tensor(tokens))
        logits.append(model.lm_head(mtp.hyper_connection_mixer(out))[0, -1].numpy())
        drafts.append(int(logits[-1].argmax()))
        tokens.append(drafts[-1])
        streams = torch.cat([streams, out[:, -1:]], dim=1)
    return following, drafts, logits


def published(state: dict[str, torch.Tensor], parts: int) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, tables of n-grams in parts, without what follows from the config."""
    tensors = {}
    for name, tensor in state.items():
        if name.endswith("ngram_embedding.weight"):
            stem = name.removesuffix("weight")
            tensors |= {f"{stem}shard_{i}.weight": part for i, part in enumerate(tensor.chunk(parts))}
        else:
            tensors[name] = tensor
    return tensors


def expected(model: Qwen4ExpForCausalLM) -> dict[str, np.ndarray]:
    ids = torch.randint(0, VOCAB, (LENGTH,))
    greedy = []
    for n in PROMPTS:
        out, text = model(ids[None, :n], use_cache=True), []
        while len(text) < GREEDY:
            text.append(int(out.logits[0, -1].argmax()))
            out = model(torch.tensor([text[-1:]]), past_key_values=out.past_key_values, use_cache=True)
        greedy.append(text)
    logits = model(ids[None], use_cache=False).logits[0].numpy()
    return {"ids": ids.int().numpy(), "logits": logits, "greedy": np.array(greedy, np.int32)}


def main() -> None:
    for seed, (name, more) in enumerate(VARIANTS.items()):
        if name not in (sys.argv[1:] or VARIANTS):
            continue
        shutil.rmtree(HERE / name, ignore_errors=True)
        torch.manual_seed(seed)
        config = Qwen4ExpTextConfig(**{**SIZES, **EXPERTS, "rope_parameters": MROPE, **OWN, **more})
        config._attn_implementation = "eager"
        model, tied = Qwen4ExpForCausalLM(config).float().eval(), config.tie_word_embeddings
        randomise(model, tied)
        body = published(model.state_dict(), config.split_ngram_parts)
        body = {k: v for k, v in body.items() if not (tied and k == "lm_head.weight")}
        saved = {**config.to_dict(), "architectures": ["Qwen4ExpForCausalLM"], "layer_types": more["layer_types"]}
        if tied:
            body = one_by_one(body)
        else:  # as published: the text model beside a vision tower
            body = {k.replace("model.", "model.language_model.", 1): v for k, v in body.items()}
            body["model.visual.patch_embed.proj.weight"] = torch.zeros(4, 3)
            with torch.random.fork_rng():  # so that the tokens are those that were drawn without a module
                mtp = Mtp(model).float().eval()
                randomise(mtp, False)
            body |= {f"mtp.{key}": tensor for key, tensor in mtp.state_dict().items()}
            saved["mtp_num_hidden_layers"] = 1
            saved = {
                "architectures": ["Qwen4ExpForConditionalGeneration"],
                "model_type": "qwen4_exp",
                "text_config": saved,
                "vision_config": {"model_type": "qwen4_exp_vision"},
                "tie_word_embeddings": False,
            }
        (HERE / name).mkdir(parents=True)
        (HERE / name / "config.json").write_text(json.dumps(saved, indent=1))
        whole = lambda v: v if v.dtype == torch.int64 else v.bfloat16()  # noqa: E731
        tensors = {k: whole(v).contiguous().clone() for k, v in body.items()}
        save_file(tensors, HERE / name / "model.safetensors", metadata={"format": "pt"})
        with torch.no_grad():
            values = expected(model)
            if not tied:
                chains = [chain(model, mtp, torch.tensor(values["ids"][:n]).long()) for n in CHAINS]
                following, drafts, logits = (np.array(each) for each in zip(*chains, strict=True))
                values |= {
                    "next": following.astype(np.int32),
                    "drafts": drafts.astype(np.int32),
                    "draft_logits": logits,
                }
        np.savez_compressed(HERE / f"{name}.npz", **values)
        print(name, f"logits spread {values['logits'].std():.2f}")


if __name__ == "__main__":
    main()
