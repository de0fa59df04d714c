"""Make tests/golden/pooling.npz: embeddings and scores that transformers computes with `checkpoints/qwen3-untied`.

Run it as make_llama_qwen3.py. For each length T of LENGTHS: `ids_T`, `embedding_T` f32[d] by Qwen3-Embedding's recipe
(the final norm's output of the last token, divided by its length), `mean_T` likewise of all tokens, and `score_T` by
Qwen3-Reranker's: the softmax of the logits of ANSWERS after the last token, and of these the second.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
LENGTHS = (1, 7, 40)
ANSWERS = (11, 23)


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(HERE / "checkpoints" / "qwen3-untied", dtype=torch.float32).eval()
    rng, out = np.random.default_rng(59), {}
    for length in LENGTHS:
        ids = rng.integers(2, 64, length)
        with torch.no_grad():
            done = model(torch.tensor(ids)[None], output_hidden_states=True)
        rows = done.hidden_states[-1][0]
        unit = lambda vector: torch.nn.functional.normalize(vector, dim=0).numpy()  # noqa: E731
        score = torch.softmax(done.logits[0, -1, list(ANSWERS)], dim=0)[1].item()
        out |= {f"ids_{length}": ids, f"embedding_{length}": unit(rows[-1]), f"mean_{length}": unit(rows.mean(0))}
        out[f"score_{length}"] = np.float64(score)
    np.savez(HERE / "pooling.npz", **out)


main()
