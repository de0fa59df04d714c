"""Llama 3's calls in JSON."""

from tests.server.parsers.cases import TOOLS, call, cases_of

case, plain = cases_of("llama3_json")
LLAMA = [
    plain("no JSON", "vllm llama3_json", "Text and no call."),
    case("with arguments", "vllm llama3_json", '{"name": "search", "parameters": {"query": "a b", "limit": 10}}',
         call("search", query="a b", limit=10)),
    case("text around", "vllm llama3_json", 'Here: {"name": "get_time", "parameters": {}} And so on.', call("get_time"),
         says="Here:  And so on."),
    plain("invalid JSON", "vllm llama3_json", '{"name": "search", "parameters": {oh no}'),
    case("arguments for parameters", "vllm llama3_json", '{"name": "search", "arguments": {"query": "x"}}',
         call("search", query="x")),
    case("three with semicolons", "vllm llama3_json",
         '{"name": "search", "parameters": {"query": "1"}}; {"name": "get_time", "parameters": {}} ; '
         '{"name": "search", "parameters": {"query": "2"}}', call("search", query="1"), call("get_time"),
         call("search", query="2")),
    case("nested deeply", "vllm llama3_json", '{"name": "f", "parameters": {"a": {"b": {"c": {"d": {"e": "deep"}}}}}}',
         ("f", {"a": {"b": {"c": {"d": {"e": "deep"}}}}})),
    case("brackets in strings", "vllm llama3_json", '{"name": "f", "parameters": {"q": "a {b} [c]","n": {"i": "{d"}}}',
         ("f", {"q": "a {b} [c]", "n": {"i": "{d"}})),
    case("quotes in strings", "vllm llama3_json", r'{"name": "f", "parameters": {"t": "He said \"Hi {you}\""}}',
         ("f", {"t": 'He said "Hi {you}"'})),
    case("python tag", "sglang llama32", 'Intro. <|python_tag|>{"name": "get_time", "parameters": {}}',
         call("get_time"), says="Intro. "),
    case("two python tags", "sglang llama32", '<|python_tag|>{"name": "get_time", "parameters": {}}'
         '<|python_tag|>{"name": "search", "parameters": {"query": "x"}}', call("get_time"), call("search", query="x")),
    case("invalid, then valid", "sglang llama32", '{"name": "f", "parameters": {{"name": "f", "parameters": {}}',
         call("f"), says='{"name": "f", "parameters": {'),
    case("type function", "llama 3.1 prompt format",
         '{"type": "function", "name": "get_time", "parameters": {"zone": "CET"}}', call("get_time", zone="CET")),
    plain("JSON that is an answer", "-", '{"answer": {"name": "x"}, "n": [1, {"a": 2}]}'),
    plain("no tool of the request's", "-", '{"name": "Ada", "parameters": {}}', tools=TOOLS),
    plain("a name and no arguments", "-", '{"name": "get_time"}'),
    plain("cut off", "-", '{"parameters": {"a": {"name": "f", "parameters": {}}'),
    plain("code behind the tag", "vllm llama3_json", '<|python_tag|>search.call(q="x")'),
]  # fmt: skip
