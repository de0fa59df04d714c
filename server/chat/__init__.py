"""How the served model speaks in a chat: tools and reasoning in its prompt, its text and its grammar."""
