"""Define what a user asks for: options, flags, requests, and the values of a config.json."""
