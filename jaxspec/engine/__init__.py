"""Loop between host and device, and what a caller of Python uses."""
