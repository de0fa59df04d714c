"""Mistral's calls, of both kinds."""

from tests.server.parsers.cases import call, cases_of

case, plain = cases_of("mistral")
MISTRAL = [
    plain("no call", "vllm mistral", "A test."),
    case("one call", "vllm mistral", '[TOOL_CALLS][{"name": "add", "arguments":{"a": 3.5, "b": 4}}]',
         call("add", a=3.5, b=4)),
    case("spaces everywhere", "vllm mistral", '[TOOL_CALLS]  [ {"name":"add" , "arguments" : {"a": 3, "b": 4} } ]',
         call("add", a=3, b=4)),
    case("arguments before the name", "vllm mistral",
         '[TOOL_CALLS] [{"arguments":{"city": "Oslo"}, "name": "get_weather"}]', call("get_weather", city="Oslo")),
    case("a name in the arguments", "vllm mistral",
         '[TOOL_CALLS] [{"arguments":{"name": "J. Doe"}, "name": "get_age"}]', call("get_age", name="J. Doe")),
    case("two, the last left open", "vllm mistral",
         '[TOOL_CALLS][{"name": "add", "arguments": {"a": 3}}, {"name": "get_weather", "arguments":{"city": "Oslo"}]',
         call("add", a=3), call("get_weather", city="Oslo")),
    case("compact", "vllm mistral v11", '[TOOL_CALLS]add{"a": 3.5, "b": 4}', call("add", a=3.5, b=4)),
    case("compact with args marker", "sglang mistral",
         '[TOOL_CALLS]next_step[ARGS]{"decision":"TOOL", "content":"look"}',
         call("next_step", decision="TOOL", content="look")),
    case("compact, two", "vllm mistral v11", '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]mul[CALL_ID]abc123def[ARGS]{"b": {}}',
         call("add", a=1), call("mul", b={})),
    case("brackets in a string", "sglang mistral",
         '[TOOL_CALLS] [{"name":"next_step", "arguments":{"decision":"","content":"```\\nis: [City] - [Sky]\\n```"}}]',
         call("next_step", decision="", content="```\nis: [City] - [Sky]\n```")),
    case("text before", "sglang mistral", 'Before: [TOOL_CALLS] [{"name":"next_step", "arguments":{"decision":"X"}}]',
         call("next_step", decision="X"), says="Before: "),
    case("a brace too many", "vllm hermes", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 3}}}]ok', call("add", a=3),
         says="ok"),
    plain("not a call", "-", "[TOOL_CALLS] hm, no."),
    case("cut off", "-", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 3', ("add", '{"a": 3')),
    plain("brackets of an answer", "-", "[TOOL] [1, 2]"),
]  # fmt: skip
