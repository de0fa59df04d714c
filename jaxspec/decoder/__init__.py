"""Decoder layers: the loop over them (`stack`), the paths that give it steps, and the choice of one (`forward`)."""
