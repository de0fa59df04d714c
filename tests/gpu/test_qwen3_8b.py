"""A model of real size fits and decodes: Qwen3-8B's shapes with random weights, in bfloat16."""

import gc
import json

import jax
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from tests.support.kernels import QWEN3_8B

pytestmark = pytest.mark.gpu

CONFIG = QWEN3_8B | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
PROMPT_TOKENS, NEW_TOKENS, REQUESTS = 1024, 32, 4
GIB = 2**30


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_it_decodes_within_its_memory_plan(draft, tmp_path, figures):
    if jax.default_backend() != "gpu":
        pytest.skip("16 GB of weights, and minutes a token on a CPU")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    before = bytes_in_use()
    llm = LLM(
        str(tmp_path),
        draft,
        load_format="dummy",
        context_length=2048,
        max_running_requests=REQUESTS,
        chunked_prefill_size=1024,
        skip_warmup=True,  # compile what is used only
    )
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    taken = {}
    for count in (1, REQUESTS):
        for timed in (False, True):  # the first time compiles; its prompts are others, so the second finds none cached
            prompts = rng.integers(0, CONFIG["vocab_size"], (count, PROMPT_TOKENS)).tolist()
            compiles = llm.engine.stats()["compiles_total"]
            outs = llm.generate(prompts, params)
            assert [len(out.token_ids) for out in outs] == [NEW_TOKENS] * count
            assert not timed or llm.engine.stats()["compiles_total"] == compiles
        last = outs[-1].metrics  # the youngest: all its rounds come after every prefill
        taken[f"{count} requests"] = {
            "ms per round": 1e3 * (last.latency - last.ttft) / last.verify_rounds,
            "ttft ms": [1e3 * out.metrics.ttft for out in outs],
            "accept len": last.accept_length,
        }
    figures[f"qwen3-8b dummy, {draft}"] = taken | memory(llm, before)
    del llm
    gc.collect()  # the next case needs the room


def bytes_in_use():
    return jax.local_devices()[0].memory_stats()["bytes_in_use"]


def memory(llm, before):
    """Where the device's memory went, GiB, `before` bytes being others'. The plan must have counted all that stays."""
    plan, stats = llm.engine.runner.plan, jax.local_devices()[0].memory_stats()
    static = plan.weight_bytes + plan.draft_weight_bytes + plan.kv_bytes + plan.slot_bytes
    used = stats["bytes_in_use"] - before
    assert static <= used <= static + plan.workspace_bytes
    return {
        "planned static GiB": static / GIB,
        "planned workspace GiB": plan.workspace_bytes / GIB,
        "in use GiB": used / GIB,
        "peak GiB": stats["peak_bytes_in_use"] / GIB,
        "device limit GiB": stats["bytes_limit"] / GIB,
    }
