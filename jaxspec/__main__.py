"""`python -m jaxspec serve MODEL`, and the other commands of `jaxspec.cli`."""

import sys

from jaxspec.cli import main

if __name__ == "__main__":
    sys.exit(main())
