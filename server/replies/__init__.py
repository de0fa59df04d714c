"""Responses: deltas in, OpenAI's objects out, whole or chunk by chunk."""

from server.replies.chat import ChatReply
from server.replies.completion import CompletionReply
from server.replies.reply import DONE, Answer, Job, Prompt, Reply, encode, event

__all__ = ["DONE", "Answer", "ChatReply", "CompletionReply", "Job", "Prompt", "Reply", "encode", "event"]
