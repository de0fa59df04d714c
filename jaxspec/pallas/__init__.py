"""Device operations, one a file: its signature, its reference in plain jnp, and what chooses a kernel for it."""
