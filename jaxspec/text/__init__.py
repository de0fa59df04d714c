"""Turn text into tokens and back: tokenizers, chat templates, stop strings, bounds of lengths."""
