"""`jaxspec.drafters.base` by the name under which a user's drafter imports it."""

import sys

from jaxspec.drafters import base

sys.modules[__name__] = base
