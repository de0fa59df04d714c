"""Write a model's tokenizer as files that transformers reads: `python scripts/write_tokenizer.py MODEL FOLDER`.

For clients that count tokens themselves (guidellm, aiperf, lm_eval) where the model is a GGUF file, as the demo is, or
where the hub can't be reached.
"""

import sys

from jaxspec import CheckpointError
from jaxspec.checkpoint import locate
from jaxspec.text.errors import TokenizerError

if len(sys.argv) != 3:
    sys.exit("usage: python scripts/write_tokenizer.py MODEL FOLDER")
model, folder = sys.argv[1:]
try:
    tokenizer = locate(model).tokenizer()
except (CheckpointError, TokenizerError) as error:
    sys.exit(str(error))
if tokenizer is None:
    sys.exit(f"{model} has no tokenizer")
tokenizer.save(folder)
print(f"wrote {model}'s tokenizer to {folder}")
