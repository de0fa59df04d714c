"""A tiny model for the benchmarks that run engines, and flags that keep these small."""

import pytest

from tests.support.tiny import BYTE_VOCAB, tiny_checkpoint


@pytest.fixture(scope="session")
def tiny() -> list[str]:
    """Engine flags of a model of one layer. The same for all tests, so that they compile the same programs."""
    model = str(tiny_checkpoint(vocab=BYTE_VOCAB, tokenizer=True, num_hidden_layers=1))
    sizes = ["--context-length", "256", "--chunked-prefill-size", "32"]
    return ["--model", model, *sizes, "--skip-warmup", "--few-programs"]
