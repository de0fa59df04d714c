"""Serve several engines behind one port."""
