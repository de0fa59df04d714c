"""The OpenAI-compatible server over `jaxspec.AsyncLLM`: `python -m server --help`.

A request comes in through what stands before the routes:

    http/         connections and their limits; the gate: API key, size of a body, request id; bodies; pages of other
                  origins; errors in OpenAI's format and the log of them; the API's description, and /docs

is served by

    app           puts all of this together       routes/    one file a group of routes
    generate      prompts in, deltas out          protocol/  what a request may say
    workers       threads for what takes long     replies/   what a response says
    chat/         how the model speaks: tools and reasoning in its prompt, its text and its grammar
    parsers/      text in; reasoning, content and tool calls out

`response_store` keeps responses that later requests go on from, and `stop_watcher` hears SIGTERM where Python can't.
All is seen in `metrics`, `logs` and `playground/`. `cli/` has the flags, and translates other servers' command lines.

Only `routes` and `generate` talk to the engine; nothing in here touches an array.
"""
