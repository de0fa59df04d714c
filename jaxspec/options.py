"""`jaxspec.config.options` by the name under which a user's drafter imports it."""

import sys

from jaxspec.config import options

sys.modules[__name__] = options
