"""What every body has in common: unknown fields are refused by name, and text must be such as UTF-8 can spell."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from jaxspec.request import RequestError


def check_text(text: str) -> str:
    """Refuse what JSON can spell and UTF-8 can't: it could be neither tokenised nor sent back."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text has a lone surrogate at character {error.start}") from None
    return text


Text = Annotated[str, AfterValidator(check_text)]


class Body(BaseModel):
    """A JSON object whose unknown fields are refused with the nearest known name."""

    model_config = ConfigDict(strict=True, extra="forbid")
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    # Fields that other servers know and that would change the answer, with the values of each that ask for nothing.
    UNSUPPORTED: ClassVar[dict[str, tuple]] = {}

    @model_validator(mode="before")
    @classmethod
    def _know_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name in cls.UNSUPPORTED:
                if value is not None and value not in cls.UNSUPPORTED[name]:
                    raise RequestError(f"{name} is not supported by this server; leave it out", name)
            elif name not in cls.IGNORED:
                near = difflib.get_close_matches(name, cls.model_fields, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known fields: {', '.join(sorted(cls.model_fields))}"
                raise RequestError(f"unknown field {name!r}; {hint}", name)
        return kept
