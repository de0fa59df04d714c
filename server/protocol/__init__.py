"""Bodies of requests: field names, types, and which fields are accepted, ignored or refused.

Invariant: nothing that would change the answer is dropped in silence. A field is used, or known not to matter
(`IGNORED`), or refused by name. Ranges are `SamplingParams`' business, so the API and the offline engine can't differ.
"""

from server.protocol.chat import ChatRequest
from server.protocol.completion import CompletionRequest

__all__ = ["ChatRequest", "CompletionRequest"]
