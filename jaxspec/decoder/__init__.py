"""A decoder: what it computes (`spec`), a layer's equations (`layer`), the ways to run a stack of them (`forward`)."""
