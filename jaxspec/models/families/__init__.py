"""Model families, a file each: `MODELS` has the module of each `model_type`, which is the file's name.

A family has two functions, and nothing else: `read(hf) -> Decoder` describes what a config.json computes, and
`tensors(decoder) -> pytree of Param` declares the arrays, by their names in its checkpoints. What a config.json may be
silent about is in the family's `DEFAULTS`, if it has any; `read` is given them too. Added tokens that end its texts,
whatever the files say, are in `ENDS`. `mtp_layer(decoder)` is the layer of its MTP module, where that isn't one with
full attention and the experts, and `mtp_tensors(layer, width, prefix)` declares it, where names are the family's own.
`MTP_NORMED = False`: the module's output takes the model's last norm. `mtp_parameters(decoder)` declares the whole
module of several residual streams. A decoder's equations and the ways to run them
are in `jaxspec.decoder`.
"""

import importlib
import pkgutil

MODELS = {name: importlib.import_module(f"{__name__}.{name}") for _, name, _ in pkgutil.iter_modules(__path__)}
