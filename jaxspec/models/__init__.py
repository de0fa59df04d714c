"""Describe what a checkpoint computes: layers, weights, and a file for each model family."""
