"""Make tests/golden/{lilicorr,domino} and tests/golden/expected/{lilicorr,domino}-*.safetensors.

Both drafters are written here once more, in plain PyTorch after the papers (arXiv 2608.20530, 2605.29707) and the names
of their tensors. Only the target comes from `transformers`. Needs PyTorch (see make_llama_qwen3.py) and
tests/golden/dflash/target (see make_dflash.py):

    torch-venv/bin/python tests/golden/make_lilicorr_domino.py

`METHOD/VARIANT` are checkpoints in float32. `expected/METHOD-VARIANT.safetensors` holds, for each prompt length T in
LENGTHS: `ids_T` i32[T + 1], a prompt and the target's next token; of the block behind it `tokens_T` i32[n]; of LiLiCorr
the row's `candidates_T` i32[n, k] and their `scores_T` f32[n, k], of which the highest is drafted; of Domino `logits_T`
f32[n, v] after the correction.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
LENGTHS = (7, 33, 150)
V, D, HEADS, KV_HEADS, HEAD, MLP, EPS, THETA = 40, 32, 4, 2, 8, 48, 1e-6, 10000.0
COMMON = dict(
    model_type="qwen3", vocab_size=V, hidden_size=D, intermediate_size=MLP, num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, head_dim=HEAD, num_hidden_layers=2, rms_norm_eps=EPS, rope_theta=THETA,
    hidden_act="silu", attention_bias=False, tie_word_embeddings=False, max_position_embeddings=512,
    num_target_layers=6, torch_dtype="float32",
)  # fmt: skip
LILICORR = {
    # as wide as the draft, so that embeddings aren't projected
    "plain": dict(
        block_size=6, mask_token_id=39, target_layer_ids=[1, 4], lilicorr_candidate_topk=4, lilicorr_hidden_size=0,
        lilicorr_num_layers=2, lilicorr_num_heads=4, lilicorr_mlp_ratio=2.0, lilicorr_factor_dim=6,
        lilicorr_vector_eps=1e-6, lilicorr_logit_scale=10.0,
    ),
    # narrower, with convolutions, and with an embedding and a head of its own
    "convolved": dict(
        block_size=5, mask_token_id=38, target_layer_ids=[3, -1], conv_kernel_size=2, conv_group_size=8,
        lilicorr_candidate_topk=8, lilicorr_hidden_size=12, lilicorr_num_layers=1, lilicorr_num_heads=3,
        lilicorr_mlp_ratio=1.5, lilicorr_factor_dim=5, lilicorr_vector_eps=1e-6, lilicorr_logit_scale=7.0,
    ),
}  # fmt: skip
DOMINO = {
    # SpecForge's layout, as the public one: the known token's row drafts too
    "shifted": dict(
        block_size=6, mask_token_id=39, target_layer_ids=[1, 4], emb_dim=5, gru_hidden_dim=7, pure_draft_prefix_len=1,
        shift_label=True,
    ),
    # speculators' layout, in which the known token's row drafts nothing
    "speculators": dict(
        block_size=5, mask_token_id=38, target_layer_ids=[3], emb_dim=4, gru_hidden_dim=6, pure_draft_prefix_len=0,
        shift_label=False,
    ),
}  # fmt: skip


def drawn(shape: tuple[int, ...], name: str) -> torch.Tensor:
    noise = torch.randn(shape)
    if name.endswith(("bias", "slot_bias")):
        return 0.3 * noise
    if len(shape) == 1:
        return 1 + 0.3 * noise
    if "base_kernel" in name:
        return 0.5 * noise
    return noise if "embed" in name and "proj" not in name else noise * shape[-1] ** -0.5


def backbone(own: dict) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of DFlash's layers, with convolutions if `own` has them."""
    shapes = {"fc.weight": (D, D * len(own["target_layer_ids"])), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for i in range(COMMON["num_hidden_layers"]):
        name = f"layers.{i}."
        shapes |= {f"{name}{norm}.weight": (D,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{name}self_attn.{norm}.weight": (HEAD,) for norm in ("q_norm", "k_norm")}
        shapes[f"{name}self_attn.q_proj.weight"] = HEADS * HEAD, D
        shapes[f"{name}self_attn.o_proj.weight"] = D, HEADS * HEAD
        shapes |= {f"{name}self_attn.{part}_proj.weight": (KV_HEADS * HEAD, D) for part in "kv"}
        shapes |= {f"{name}mlp.{part}_proj.weight": (MLP, D) for part in ("gate", "up")}
        shapes[f"{name}mlp.down_proj.weight"] = (D, MLP)
        if taps := own.get("conv_kernel_size"):
            for conv in ("attention_conv", "mlp_conv"):
                shapes[f"{name}{conv}.base_kernel"] = (2, taps, D)
                shapes[f"{name}{conv}.kernel_projection.weight"] = (2 * taps * D // own["conv_group_size"], D)
    return shapes


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE of x [t, heads, HEAD]."""
    angles = positions[:, None] * THETA ** -(torch.arange(0, HEAD, 2) / HEAD)
    angles = torch.cat([angles, angles], -1)[:, None]
    halves = torch.cat([-x[..., HEAD // 2 :], x[..., : HEAD // 2]], -1)
    return x * angles.cos() + halves * angles.sin()


def fill(t: dict, own: dict, context: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Final hidden states [B, D] of a block's embedded rows behind a projected context [T, D]."""
    length, x = len(context), block
    positions = torch.arange(length + len(block), dtype=torch.float32)
    for i in range(COMMON["num_hidden_layers"]):
        w = lambda name, i=i: t[f"layers.{i}.{name}"]  # noqa: E731

        def around(name: str, norm: str, run, x: torch.Tensor, w=w) -> torch.Tensor:
            rows = rms(x, w(norm + ".weight"))
            if not own.get("conv_kernel_size"):
                return x + run(rows)
            made = (rows @ w(name + ".kernel_projection.weight").T).view(len(rows), 2, own["conv_kernel_size"], -1)
            kernels = w(name + ".base_kernel") + made.repeat_interleave(own["conv_group_size"], -1)
            return x + convolve(run(convolve(rows, kernels[:, 0])), kernels[:, 1])

        def attention(rows: torch.Tensor, w=w) -> torch.Tensor:
            heads = lambda x, name: (x @ w(f"self_attn.{name}_proj.weight").T).view(len(x), -1, HEAD)  # noqa: E731
            seen = torch.cat([context, rows])
            q = rotated(rms(heads(rows, "q"), w("self_attn.q_norm.weight")), positions[length:])
            k = rotated(rms(heads(seen, "k"), w("self_attn.k_norm.weight")), positions)
            k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, heads(seen, "v")))
            weights = (torch.einsum("qhd,khd->hqk", q, k) * HEAD**-0.5).softmax(-1)
            return torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ w("self_attn.o_proj.weight").T

        def mlp(rows: torch.Tensor, w=w) -> torch.Tensor:
            gate, up = (rows @ w(f"mlp.{name}_proj.weight").T for name in ("gate", "up"))
            return (F.silu(gate) * up) @ w("mlp.down_proj.weight").T

        x = around("attention_conv", "input_layernorm", attention, x)
        x = around("mlp_conv", "post_attention_layernorm", mlp, x)
    return rms(x, t["norm.weight"])


def convolve(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for tap in range(min(kernels.shape[1], row + 1)):
            out[row] += kernels[row, tap] * x[row - tap]
    return out


class Network(torch.nn.Module):
    """LiLiCorr's network; its parameters have the published names."""

    def __init__(self, own: dict):
        super().__init__()
        size = {key.removeprefix("lilicorr_"): value for key, value in own.items() if key.startswith("lilicorr_")}
        h, block, linear = size["hidden_size"] or D, own["block_size"], torch.nn.Linear
        self.size, self.block = size, block
        if h != D:
            self.token_proj = linear(D, h)
        self.pass_hidden_proj, self.context_proj = linear(D, h), linear(D, h)
        sequence = torch.nn.LayerNorm(5), linear(5, h), torch.nn.SiLU(), linear(h, h)
        self.feature_mlp = torch.nn.Sequential(*sequence)
        parameter = lambda *shape: torch.nn.Parameter(torch.zeros(shape))  # noqa: E731
        self.slot_embedding = parameter(1, 1, block - 1, 1, h)
        self.rank_embedding = parameter(1, 1, 1, size["candidate_topk"], h)
        self.relative_slot_bias = parameter(size["num_heads"], 2 * block - 1)
        self.same_slot_bias = parameter(size["num_heads"])
        self.layers = torch.nn.ModuleList(self.layer(h, size) for _ in range(size["num_layers"]))
        self.output_norm, self.anchor_norm = torch.nn.RMSNorm(h, EPS), torch.nn.RMSNorm(h, EPS)
        self.factor_input_proj = linear(3 * h, h)
        self.out_head, self.in_head, self.anchor_out_head = (linear(h, size["factor_dim"]) for _ in range(3))

    @staticmethod
    def layer(h: int, size: dict) -> torch.nn.Module:
        layer, wide = torch.nn.Module(), int(h * size["mlp_ratio"])
        layer.attn_norm, layer.mlp_norm = torch.nn.RMSNorm(h, EPS), torch.nn.RMSNorm(h, EPS)
        layer.attn = torch.nn.MultiheadAttention(h, size["num_heads"], batch_first=True)
        layer.mlp = torch.nn.Sequential(torch.nn.Linear(h, wide), torch.nn.SiLU(), torch.nn.Linear(wide, h))
        return layer

    def forward(self, embedded, logprobs, rows, anchor):
        """Scores [k] of the first row's candidates and [n - 1, k, k] of the later rows'."""
        n, k = logprobs.shape
        x = self.token_proj(embedded) if hasattr(self, "token_proj") else embedded
        features = [
            logprobs, logprobs.exp(), logprobs - logprobs.max(-1, keepdim=True).values,
            (torch.arange(k) / (k - 1)).expand(n, k), (torch.arange(k) == 0).float().expand(n, k),
        ]  # fmt: skip
        x = x + self.pass_hidden_proj(rows)[:, None] + self.feature_mlp(torch.stack(features, -1))
        x = (x + self.slot_embedding[0, 0] + self.rank_embedding[0, 0]).flatten(0, 1)[None]
        slot = torch.arange(n).repeat_interleave(k)
        away = slot[:, None] - slot
        bias = self.relative_slot_bias[:, away + self.block - 1] + (away == 0) * self.same_slot_bias[:, None, None]
        for layer in self.layers:
            rows = layer.attn_norm(x)
            x = x + layer.attn(rows, rows, rows, attn_mask=bias, need_weights=False)[0]
            x = x + layer.mlp(layer.mlp_norm(x))
        x = self.output_norm(x).view(n, k, -1)
        a = self.anchor_norm(self.context_proj(anchor))
        u = F.silu(self.factor_input_proj(torch.cat([x, a.expand_as(x), x * a], -1)))
        unit = lambda x: F.normalize(x, dim=-1, eps=self.size["vector_eps"])  # noqa: E731
        leaves, enters = unit(self.out_head(u)), unit(self.in_head(u))
        start = enters[0] @ unit(self.anchor_out_head(a))
        pair = torch.einsum("ncf,ndf->ncd", leaves[:-1], enters[1:])
        return self.size["logit_scale"] * start, self.size["logit_scale"] * pair


def lilicorr(network: Network, hidden: torch.Tensor, context: torch.Tensor, embed, head) -> dict:
    """`embed` is the target's, `head` the one that the drafter uses."""
    rows = hidden[1:]
    logprobs, ids = (rows @ head.T).log_softmax(-1).topk(network.size["candidate_topk"], -1)
    start, pair = network(embed[ids], logprobs, rows, context[-1])
    scores, places = [start], [int(start.argmax())]
    for step in pair:
        scores.append(step[places[-1]])
        places.append(int(scores[-1].argmax()))
    tokens = ids[torch.arange(len(ids)), torch.tensor(places)]
    print(f"the lattice changed {int((tokens != ids[:, 0]).sum())} drafts of {len(ids)}")
    return {"tokens": tokens, "candidates": ids, "scores": torch.stack(scores)}


def domino(own: dict, t: dict, hidden: torch.Tensor, text, embed, head) -> dict:
    gru = torch.nn.GRU(D, own["gru_hidden_dim"], bias=False)
    gru.load_state_dict({name: t["prefix_gru." + name] for name in ("weight_ih_l0", "weight_hh_l0")})
    rows, token, state, logits, tokens = hidden[int(not own["shift_label"]) :], text[-1], None, [], []
    for step, row in enumerate(rows):
        _, state = gru(embed[token][None], state)
        logits.append(row @ head.T)
        if step >= own["pure_draft_prefix_len"]:
            latent = F.silu(torch.cat([row, state[0]]) @ t["embed_proj.0.weight"].T)
            logits[-1] = logits[-1] + latent @ t["embed_proj.2.weight"].T
        token = logits[-1].argmax()
        tokens.append(token)
    changed = int(((rows @ head.T).argmax(-1) != torch.stack(tokens)).sum())
    print(f"the correction changed {changed} drafts of {len(tokens)}")
    return {"tokens": torch.stack(tokens), "logits": torch.stack(logits)}


def write(folder: Path, hf: dict, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")


def config(method: str, name: str, own: dict) -> dict:
    if name != "speculators":
        architecture = {"lilicorr": "LiLiCorrDraftModel", "domino": "DominoDraftModel"}[method]
        own = own if method == "lilicorr" else own | {"projector_type": "domino"}
        return {**COMMON, "architectures": [architecture], "block_size": own["block_size"], "dflash_config": own}
    names = {"emb_dim": "logits_correction_emb_dim", "shift_label": "sample_from_anchor"}
    flat = {names.get(key, key): value for key, value in own.items() if key != "target_layer_ids"}
    ids = [i + 1 for i in own["target_layer_ids"]]
    return {
        "architectures": ["DominoSpeculator"], "speculators_model_type": "domino", "draft_vocab_size": V,
        "aux_hidden_state_layer_ids": ids, "transformer_layer_config": COMMON, **flat,
    }  # fmt: skip


@torch.no_grad()
def main() -> None:
    torch.manual_seed(2)
    target = Qwen3ForCausalLM.from_pretrained(HERE / "dflash" / "target", attn_implementation="eager").float().eval()
    ids = torch.randint(0, V - 3, (max(LENGTHS),))
    texts = {n: torch.cat([ids[:n], target(ids[None, :n]).logits[0, -1:].argmax(-1)]) for n in LENGTHS}
    for method, variants in {"lilicorr": LILICORR, "domino": DOMINO}.items():
        shutil.rmtree(HERE / method, ignore_errors=True)
        for name, own in variants.items():
            shapes = backbone(own)
            if method == "domino":
                g, e = own["gru_hidden_dim"], own["emb_dim"]
                shapes |= {"prefix_gru.weight_ih_l0": (3 * g, D), "prefix_gru.weight_hh_l0": (3 * g, g)}
                shapes |= {"embed_proj.0.weight": (e, D + g), "embed_proj.2.weight": (V, e)}
            if name == "convolved":
                shapes |= {"embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}
            t = {key: drawn(shape, key) for key, shape in shapes.items()}
            if method == "lilicorr":
                network = Network(own).eval()
                made = {key: drawn(tuple(x.shape), key) for key, x in network.state_dict().items()}
                network.load_state_dict(made)
                t |= {"lilicorr." + key: x for key, x in made.items()}
            stored = t
            if name == "speculators":
                head = ("prefix_gru.", "embed_proj.")
                stored = {("logits_correction." if key.startswith(head) else "") + key: x for key, x in t.items()}
            write(HERE / method / name, config(method, name, own), stored)
            theirs = target.model.embed_tokens.weight
            embed, head = t.get("embed_tokens.weight", theirs), t.get("lm_head.weight", target.lm_head.weight)
            expected = {}
            for length, text in texts.items():
                states = target(text[None, :-1], output_hidden_states=True).hidden_states
                features = torch.cat([states[i + 1][0] for i in own["target_layer_ids"]], -1)
                context = rms(features @ t["fc.weight"].T, t["hidden_norm.weight"])
                block = torch.full((own["block_size"],), own["mask_token_id"])
                block[0] = text[-1]
                hidden = fill(t, own, context, embed[block])
                if method == "lilicorr":
                    made = lilicorr(network, hidden, context, theirs, head)
                else:
                    made = domino(own, t, hidden, text, theirs, head)
                expected[f"ids_{length}"] = text.to(torch.int32)
                for key, x in made.items():
                    expected[f"{key}_{length}"] = x.to(torch.float32 if x.is_floating_point() else torch.int32)
            save_file(expected, HERE / "expected" / f"{method}-{name}.safetensors")


if __name__ == "__main__":
    main()
