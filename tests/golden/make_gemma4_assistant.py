"""Make tests/golden/assistants: tiny assistants of Gemma 4 goldens, and what transformers drafts with them.

Needs the environment of make_llama_qwen3.py, whose goldens are the targets. Run it from anywhere.

`assistants/NAME` is a Hugging Face folder in float32. Its `expected.safetensors` holds, for each prompt length T:
`next_T` i32[1], the target's token after `ids_T` of the target's golden, and after it `drafts_T` i32[DRAFTS] and
`logits_T` f32[DRAFTS, v]. transformers' bidirectional window has a key more than the window of a causal layer, by which
assistants were trained and other engines serve, so that its window is one shorter here than the config says.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

HERE = Path(__file__).resolve().parent
LENGTHS, DRAFTS, WINDOW = (7, 33, 150), 4, 20
NEAR = dict(rope_type="default", rope_theta=50.0)
PARTIAL = dict(rope_type="proportional", rope_theta=500.0, partial_rotary_factor=0.25)
TEXT = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, global_head_dim=32, hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=0, max_position_embeddings=512, sliding_window=WINDOW - 1, num_kv_shared_layers=3,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"], dtype="float32", pad_token_id=0,
    rope_parameters=dict(sliding_attention=NEAR, full_attention=PARTIAL),
)  # fmt: skip
# Of each: the target's golden, what the text config has besides, and what the assistant's has.
ASSISTANTS = {
    "dense": ("gemma4-tied", dict(attention_k_eq_v=True, num_global_key_value_heads=1), {}),
    "ordered": (
        "gemma4-inputs",
        {},
        dict(use_ordered_embeddings=True, num_centroids=16, centroid_intermediate_top_k=5),
    ),
}

modes = Gemma4TextConfig.kv_sharing_modes.fget


def sharing_modes(config: Gemma4TextConfig) -> list[str | None]:
    """Stand in for `kv_sharing_modes`. transformers 5.23's refuses a config whose layers all share, as an assistant's,
    and keeps nothing for an assistant where none do."""
    layers, shared = config.num_hidden_layers, config.num_kv_shared_layers
    if shared == layers:
        return ["reuse"] * layers
    if shared:
        return modes(config)
    last = {kind: i for i, kind in enumerate(config.layer_types)}
    return ["store" if i in last.values() else None for i in range(layers)]


Gemma4TextConfig.kv_sharing_modes = property(sharing_modes)


def randomise(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1 + 0.3 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.3 * torch.randn(buffer.shape))
            elif name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(len(buffer)))


def drafted(target: torch.nn.Module, assistant: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        out = target(ids[None].long(), output_hidden_states=True, return_shared_kv_states=True, use_cache=True)
        token, hidden = out.logits[:, -1:].argmax(-1), out.hidden_states[-1][:, -1:]
        first, drafts, logits = token, [], []
        for _ in range(DRAFTS):
            inputs = torch.cat([target.get_input_embeddings()(token), hidden], dim=-1)
            positions = torch.tensor([[len(ids)]])
            made = assistant(inputs_embeds=inputs, position_ids=positions, shared_kv_states=out.shared_kv_states)
            token, hidden = made.logits.argmax(-1), made.last_hidden_state
            drafts.append(token[0, 0]), logits.append(made.logits[0, 0].clone())
    return {
        "next": first[0].to(torch.int32).clone(),
        "drafts": torch.stack(drafts).to(torch.int32),
        "logits": torch.stack(logits),
    }


def main() -> None:
    for seed, (name, (of, text, more)) in enumerate(ASSISTANTS.items()):
        torch.manual_seed(seed)
        target = Gemma4ForCausalLM.from_pretrained(HERE / "checkpoints" / of, attn_implementation="eager").eval()
        text = Gemma4TextConfig(**TEXT, **text)
        config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=target.config.hidden_size, **more)
        config._attn_implementation = text._attn_implementation = "eager"
        assistant = Gemma4AssistantForCausalLM(config).float().eval()
        randomise(assistant)
        folder = HERE / "assistants" / name
        shutil.rmtree(folder, ignore_errors=True)
        assistant.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        written = json.loads((folder / "config.json").read_text())
        written["text_config"]["sliding_window"] = WINDOW
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
        prompts = load_file(HERE / "expected" / f"{of}.safetensors")
        tensors = {}
        for length in LENGTHS:
            made = drafted(target, assistant, prompts[f"ids_{length}"])
            tensors |= {f"{key}_{length}": value for key, value in made.items()}
        save_file(tensors, folder / "expected.safetensors")
        print(name, {key: value.tolist() for key, value in tensors.items() if key.startswith("drafts")})


if __name__ == "__main__":
    main()
