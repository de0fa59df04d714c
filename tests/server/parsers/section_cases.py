"""Calls in sections: DeepSeek's of two generations, and Kimi's."""

from tests.server.parsers.cases import ESCAPES, ESCAPES_READ, VALUES, VALUES_READ, call, cases_of

OPENS, CLOSES = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
KIMI_OPENS, KIMI_CLOSES = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def v3(name: str, arguments: str) -> str:
    return v31("function", f"{name}\n```json\n{arguments}\n```")


def kimi(name: str, arguments: str, number: int = 0) -> str:
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


case, plain = cases_of("deepseek_v31")
SECTIONS = [
    plain("no call", "vllm deepseekv31", "A plain answer."),
    case("one call, text before", "vllm deepseekv31",
         "Let me look.\n\n" + OPENS + v31("get_weather", '{"city": "東京"}') + CLOSES, call("get_weather", city="東京"),
         says="Let me look.\n\n"),
    case("two calls", "vllm deepseekv31", OPENS + v31("get_time", "{}") + v31("search", '{"query": "x"}') + CLOSES,
         call("get_time"), call("search", query="x")),
    case("all types", "vllm data types", OPENS + v31("types", VALUES) + CLOSES, ("types", VALUES_READ)),
    case("escapes", "vllm escaped strings", OPENS + v31("types", ESCAPES) + CLOSES, ("types", ESCAPES_READ)),
    case("markers in a string", "-", OPENS + v31("search", '{"query": "<｜tool▁call▁end｜> } x"}') + CLOSES,
         call("search", query="<｜tool▁call▁end｜> } x")),
    case("nothing closed", "sglang deepseekv31",
         OPENS + "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}", call("get_time")),
    case("cut off", "-", OPENS + '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 3', ("f", '{"a": 3')),
    case("no section, text behind", "-", v31("get_time", "{}") + " Done.", call("get_time"), says=" Done."),
    plain("a section of text", "-", OPENS + "none" + CLOSES),
    plain("a call without arguments", "-", OPENS + v31("f", "none")),
    case("a tool called function", "-", OPENS + v31("function", '{"a": 1}') + CLOSES, call("function", a=1)),
    case("behind reasoning", "vllm deepseekv31", "hm</think>" + OPENS + v31("get_time", "{}") + CLOSES,
         call("get_time"), thinks="hm", thinking="prompt", format="deepseek_r1+deepseek_v31"),
]  # fmt: skip

case, plain = cases_of("deepseek_v3")
SECTIONS += [
    case("one call", "vllm deepseekv3", OPENS + v3("get_weather", '{"city": "Oslo"}') + CLOSES,
         call("get_weather", city="Oslo")),
    case("two calls", "vllm deepseekv3",
         OPENS + v3("get_time", "{}") + "\n" + v3("search", '{"query": "```\\n"}') + CLOSES,
         call("get_time"), call("search", query="```\n")),
    case("as V3.1 writes it", "-", OPENS + v31("get_time", "{}") + CLOSES, call("get_time")),
]  # fmt: skip

case, plain = cases_of("kimi_k2")
SECTIONS += [
    case("one call, text before", "vllm kimi_k2",
         "I'll check. " + KIMI_OPENS + kimi("get_weather", '{"city": "北京"}') + KIMI_CLOSES,
         call("get_weather", city="北京"), says="I'll check. "),
    case("two calls", "vllm kimi_k2",
         KIMI_OPENS + kimi("get_time", "{}") + kimi("search", '{"query": "x"}', 1) + KIMI_CLOSES,
         call("get_time"), call("search", query="x")),
    case("spaces", "sglang kimi_k2",
         f"{KIMI_OPENS} <|tool_call_begin|> functions.get_time:12 <|tool_call_argument_begin|> {{}} <|tool_call_end|>\n"
         + KIMI_CLOSES, call("get_time")),
    case("a dot in a name, no prefix", "-",
         "<|tool_call_begin|>a.b:0<|tool_call_argument_begin|>{}<|tool_call_end|>", call("a.b")),
    case("a section in the singular", "vllm kimi_k2",
         "<|tool_call_section_begin|>" + kimi("get_time", "{}") + "<|tool_call_section_end|> Done.", call("get_time"),
         says=" Done."),
    case("a section ends open reasoning", "vllm kimi_k2, sglang kimi_k2",
         "<think>hm" + KIMI_OPENS + kimi("get_time", "{}") + KIMI_CLOSES, call("get_time"), thinks="hm",
         format="kimi_k2+kimi_k2"),
    case("a section mentioned in reasoning", "-", f"<think>no {KIMI_OPENS} yet</think>" + kimi("get_time", "{}"),
         call("get_time"), thinks=f"no {KIMI_OPENS} yet", format="kimi_k2+kimi_k2"),
    plain("no arguments follow", "vllm kimi_k2", KIMI_OPENS + "<|tool_call_begin|>functions.f:0<|tool_call_end|>"),
]  # fmt: skip
