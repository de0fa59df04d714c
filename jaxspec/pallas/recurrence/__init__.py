"""Carry states of linear attention: convolutions, the gated delta rule, and its replay."""
