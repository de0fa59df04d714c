"""The OpenAI-compatible server over `jaxspec.engine.AsyncLLM`: `python -m server --help`.

    options     the command line, generated from EngineConfig        gate        API key, size of a body
    app         routes                                               errors      OpenAI's error format
    protocol    what a request may say                               generate    prompts in, deltas out, disconnects
    stream      what a response says                                 logprobs    the two formats of log-probabilities
    metrics     /metrics

Only `app` and `generate` talk to the engine; nothing in here touches an array.
"""
