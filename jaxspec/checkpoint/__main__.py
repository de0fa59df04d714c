"""`python -m jaxspec.checkpoint demo` prints the demo model's file, fetching it first if need be."""

import sys

from jaxspec.checkpoint import CheckpointError, demo

if sys.argv[1:] != ["demo"]:
    sys.exit("usage: python -m jaxspec.checkpoint demo")
try:
    print(demo.fetch())
except CheckpointError as error:
    sys.exit(str(error))
