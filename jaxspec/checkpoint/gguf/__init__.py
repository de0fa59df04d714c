"""GGUF files: their header, tensors of each of their types, and the tokenizer in them."""
