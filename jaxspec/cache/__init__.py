"""Keep what a model has computed of the past: pages, states, and the memory they take."""
