"""Mistral's calls, of both kinds."""

from tests.server.parsers.cases import Case, call

MISTRAL = [
    Case("no call", "vllm mistral", "mistral", "A test.", None, "A test."),
    Case(
        "one call",
        "vllm mistral",
        "mistral",
        '[TOOL_CALLS][{"name": "add", "arguments":{"a": 3.5, "b": 4}}]',
        calls=(call("add", a=3.5, b=4),),
    ),
    Case(
        "spaces everywhere",
        "vllm mistral",
        "mistral",
        '[TOOL_CALLS]  [ {"name":"add" , "arguments" : {"a": 3, "b": 4} } ]',
        calls=(call("add", a=3, b=4),),
    ),
    Case(
        "arguments before the name",
        "vllm mistral",
        "mistral",
        '[TOOL_CALLS] [{"arguments":{"city": "Oslo"}, "name": "get_weather"}]',
        calls=(call("get_weather", city="Oslo"),),
    ),
    Case(
        "a name in the arguments",
        "vllm mistral",
        "mistral",
        '[TOOL_CALLS] [{"arguments":{"name": "J. Doe"}, "name": "get_age"}]',
        calls=(call("get_age", name="J. Doe"),),
    ),
    Case(
        "two, the last left open",
        "vllm mistral",
        "mistral",
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 3}}, {"name": "get_weather", "arguments":{"city": "Oslo"}]',
        calls=(call("add", a=3), call("get_weather", city="Oslo")),
    ),
    Case(
        "compact", "vllm mistral v11", "mistral", '[TOOL_CALLS]add{"a": 3.5, "b": 4}', calls=(call("add", a=3.5, b=4),)
    ),
    Case(
        "compact with args marker",
        "sglang mistral",
        "mistral",
        '[TOOL_CALLS]next_step[ARGS]{"decision":"TOOL", "content":"look"}',
        calls=(call("next_step", decision="TOOL", content="look"),),
    ),
    Case(
        "compact, two",
        "vllm mistral v11",
        "mistral",
        '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]mul[CALL_ID]abc123def[ARGS]{"b": {}}',
        calls=(call("add", a=1), call("mul", b={})),
    ),
    Case(
        "brackets in a string",
        "sglang mistral",
        "mistral",
        '[TOOL_CALLS] [{"name":"next_step", "arguments":{"decision":"","content":"```\\nis: [City] - [Sky]\\n```"}}]',
        calls=(call("next_step", decision="", content="```\nis: [City] - [Sky]\n```"),),
    ),
    Case(
        "text before",
        "sglang mistral",
        "mistral",
        'Before: [TOOL_CALLS] [{"name":"next_step", "arguments":{"decision":"X"}}]',
        None,
        "Before: ",
        (call("next_step", decision="X"),),
    ),
    Case(
        "a brace too many",
        "vllm hermes",
        "mistral",
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 3}}}]ok',
        None,
        "ok",
        (call("add", a=3),),
    ),
    Case("not a call", "-", "mistral", "[TOOL_CALLS] hm, no.", None, "[TOOL_CALLS] hm, no."),
    Case("cut off", "-", "mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 3', calls=(("add", '{"a": 3'),)),
    Case("brackets of an answer", "-", "mistral", "[TOOL] [1, 2]", None, "[TOOL] [1, 2]"),
]
