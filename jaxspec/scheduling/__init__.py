"""Decide who runs next, on the host and without jax: slots, pages, the prefix cache, budgets."""
