"""Write the table of known drafters into docs/known-drafters.md: `python -m scripts.drafters_table`."""

from __future__ import annotations

from pathlib import Path

from jaxspec.drafters.registry import table

DOCS = Path(__file__).parent.parent / "docs" / "known-drafters.md"
FIRST, NEXT = "| target |", "## When"  # the table's first row, and what comes after it


def main() -> None:
    text = DOCS.read_text()
    begin, end = text.index(FIRST), text.index(NEXT)
    DOCS.write_text(text[:begin] + table() + "\n\n" + text[end:])


if __name__ == "__main__":
    main()
