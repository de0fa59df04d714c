"""Model families, a file each: `MODELS` has the module of each `model_type`, which is the file's name.

A family has two functions: `read(hf) -> Decoder` describes what a config.json computes, and `tensors(decoder) -> pytree
of Param` declares the arrays, by their names in its checkpoints. A decoder's equations and the ways to run them are in
`jaxspec.decoder`. A family may have besides:

- `DEFAULTS`: what a config.json may be silent about, which `read` is given too.
- `ENDS`: added tokens that end its texts, whatever the files say.
- `tower(hf, width)`: the description of its vision tower, or None.
- `mtp_layer(decoder)`: the layer of its MTP module, where that isn't one with full attention and the experts.
- `mtp_tensors(layer, width, prefix)`: the declarations of that layer, where names are the family's own.
- `mtp_parameters(decoder)`: those of the whole module, where it has several residual streams.
- `MTP_NORMED = False`: the module's output takes the model's last norm, for it has none.
- `MTP_CHAINED = False`: each of several modules takes the target's hidden state, not the one of the module before.
"""

import importlib
import pkgutil

MODELS = {name: importlib.import_module(f"{__name__}.{name}") for _, name, _ in pkgutil.iter_modules(__path__)}
