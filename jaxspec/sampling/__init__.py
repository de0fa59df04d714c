"""Turn logits into tokens, and accept drafts."""
