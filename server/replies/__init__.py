"""What a response says: deltas in, OpenAI's objects out, whole or chunk by chunk."""

from server.replies.chat import ChatReply
from server.replies.completion import CompletionReply
from server.replies.reply import DONE, Prompt, Reply, encode, event

__all__ = ["DONE", "ChatReply", "CompletionReply", "Prompt", "Reply", "encode", "event"]
