"""Make tests/golden/bin: the EAGLE-1 drafter of tests/golden/eagle as `torch.save` writes it, whole and in shards.

    python3 -m venv torch-venv
    torch-venv/bin/pip install torch safetensors
    torch-venv/bin/python tests/golden/make_bin.py

The tensors are those of `eagle/safeailab-eagle/model.safetensors`, with what a state dict may hold: the MLP in float32,
`embed_tokens` (which an EAGLE-1 drafter doesn't use) in float16, the rest in bfloat16; `fc.weight` a transposed view;
queries, keys and values slices of one storage; norms as parameters. `legacy.bin` is in the format before torch 1.6.
"""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from pathlib import Path

import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
DRAFTER = HERE / "eagle" / "safeailab-eagle"


def state_dict() -> OrderedDict[str, torch.Tensor]:
    tensors = OrderedDict(load_file(DRAFTER / "model.safetensors"))
    for name in list(tensors):
        if ".mlp." in name:
            tensors[name] = tensors[name].float()
        if "norm" in name:
            tensors[name] = torch.nn.Parameter(tensors[name])
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].half()
    tensors["fc.weight"] = tensors["fc.weight"].t().contiguous().t()
    heads = [f"layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    rows = [len(tensors[name]) for name in heads]
    for name, part in zip(heads, torch.cat([tensors[name] for name in heads]).split(rows), strict=True):
        tensors[name] = part
    tensors._metadata = OrderedDict({"": {"version": 1}})  # as a module's own has it
    return tensors


def main() -> None:
    out, tensors = HERE / "bin", state_dict()
    shutil.rmtree(out, ignore_errors=True)
    for name in ("whole", "sharded"):
        (out / name).mkdir(parents=True)
        shutil.copy(DRAFTER / "config.json", out / name)
    torch.save(tensors, out / "whole" / "pytorch_model.bin")
    names = [list(tensors)[::2], list(tensors)[1::2]]
    files = [f"pytorch_model-{i}-of-00002.bin" for i in ("00001", "00002")]
    for file, some in zip(files, names, strict=True):
        torch.save({name: tensors[name] for name in some}, out / "sharded" / file)
    index = {"weight_map": {name: file for file, some in zip(files, names, strict=True) for name in some}}
    (out / "sharded" / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=1) + "\n")
    torch.save({"fc.weight": torch.ones(2, 2)}, out / "legacy.bin", _use_new_zipfile_serialization=False)


if __name__ == "__main__":
    main()
