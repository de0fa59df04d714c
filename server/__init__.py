"""The OpenAI-compatible server over `jaxspec.AsyncLLM`: `python -m server --help`.

A request comes in through what stands before the routes:

    connections   how many, and how long each may stand still      gate     API key, size of a body, request id
    body, json_reader, workers   large bodies beside the streams   cors     pages of other origins
    errors, refusals   OpenAI's error format, and the log of it    openapi  the API's description, and /docs

is served by

    routes/       one file a group of routes      protocol/  what a request may say
    generate      prompts in, deltas out          replies/   what a response says; logprobs
    speech, tool_prompt, structured   how the model speaks: tools and reasoning in its prompt and its text
    parsers/      text in; reasoning, content and tool calls out

and seen in `metrics`, `logs` and `playground/`. `options` and `translate` read the command line.

Only `routes` and `generate` talk to the engine; nothing in here touches an array.
"""
