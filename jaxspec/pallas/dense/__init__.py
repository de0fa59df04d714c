"""Multiply rows by dense weights, of few rows to many, in bfloat16 and FP8."""
