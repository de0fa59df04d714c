"""Structured output: text that a grammar constrains, with drafts and without.

`grammar` compiles what requests ask for, follows a completion through its grammar and makes the masks of a round;
`programs` is the round that takes them. docs/structured-output.md says how they fit together.
"""
