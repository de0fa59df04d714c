"""Write the engine's flags into docs/flags.md: `python -m scripts.flags_table`."""

from __future__ import annotations

from pathlib import Path

from jaxspec.config.engine_config import SERVER_DEFAULTS
from jaxspec.config.flags import table

DOCS = Path(__file__).parent.parent / "docs" / "flags.md"
FIRST, NEXT = "| `--model`", "| `--host`"  # rows: the engine's first, and the first after the engine's


def main() -> None:
    text = DOCS.read_text()
    begin, end = text.index(FIRST), text.index(NEXT)
    DOCS.write_text(text[:begin] + table(SERVER_DEFAULTS) + "\n" + text[end:])


if __name__ == "__main__":
    main()
