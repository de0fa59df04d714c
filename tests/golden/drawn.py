"""Random weights for the block drafters' golden models, which make_dflash.py and make_dspark.py share."""

from __future__ import annotations

import torch


def randomise(model: torch.nn.Module) -> None:
    """Draw every parameter: new models have biases at 0 and norms at 1, where leaving them out goes unnoticed."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if name.endswith(".bias"):
                parameter.copy_(0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * noise)
            elif "embed_tokens" in name or "markov_w1" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
