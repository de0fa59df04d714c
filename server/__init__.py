"""The OpenAI-compatible server over `jaxspec.engine.AsyncLLM`: `python -m server --help`.

    options     the command line, generated from EngineConfig        gate        API key, size of a body
    app         the application                                      errors      OpenAI's error format
    routes/     one file a group of routes                           generate    prompts in, deltas out, disconnects
    protocol/   what a request may say                               logprobs    the two formats of log-probabilities
    replies/    what a response says                                 metrics     /metrics

Only `routes` and `generate` talk to the engine; nothing in here touches an array.
"""
