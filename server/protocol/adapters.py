"""Bodies of the routes that load and unload adapters, vLLM's and SGLang's."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from jaxspec.config.engine_config import ADAPTER_NAME
from server.protocol.base import Body, Text

AdapterName = Annotated[Text, Field(pattern=f"^{ADAPTER_NAME}$")]


class LoadAdapter(Body):
    """A folder that PEFT wrote, in the server's --lora-root, and the name that requests are to call it by.
    `load_inplace`: an adapter of that name may be loaded; requests that have begun end with it."""

    IGNORED = frozenset({"pinned"})
    UNSUPPORTED: ClassVar[dict[str, tuple]] = {"is_3d_lora_weight": (False,)}

    lora_name: AdapterName
    lora_path: Text
    load_inplace: bool | None = None


class UnloadAdapter(Body):
    """The name of an adapter."""

    IGNORED = frozenset({"lora_int_id", "lora_id"})

    lora_name: AdapterName
