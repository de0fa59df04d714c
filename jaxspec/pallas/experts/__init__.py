"""Route tokens to experts, and multiply them by theirs."""
