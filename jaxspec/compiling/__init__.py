"""Make programs of functions, ahead of time: which there are, lowering, keeping them on disk."""
