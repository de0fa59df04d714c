"""Device operations, one a file: signature, reference in plain jnp, and the choice of a kernel."""
