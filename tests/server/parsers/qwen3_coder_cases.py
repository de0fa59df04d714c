"""Qwen3-Coder's calls in XML."""

from tests.server.parsers.cases import TOOLS, call, cases_of, coder

case, plain = cases_of("qwen3_coder", TOOLS)
CODER = [
    plain("no call", "vllm qwen3coder", "A plain answer."),
    case(
        "one call",
        "vllm qwen3coder",
        coder("get_weather", city="Dallas", state="TX", unit="fahrenheit"),
        call("get_weather", city="Dallas", state="TX", unit="fahrenheit"),
    ),
    case(
        "text before",
        "vllm qwen3coder",
        "Sure, a moment." + coder("get_weather", city="Dallas"),
        call("get_weather", city="Dallas"),
        says="Sure, a moment.",
    ),
    case(
        "an object over two lines",
        "vllm qwen3coder",
        coder("area", shape="rectangle", dimensions='{"width": 10, \n "height": 20}', precision="2"),
        call("area", shape="rectangle", dimensions={"width": 10, "height": 20}, precision=2),
    ),
    case(
        "two calls",
        "vllm qwen3coder",
        coder("get_weather", city="Dallas") + "\n" + coder("get_weather", city="Orlando"),
        call("get_weather", city="Dallas"),
        call("get_weather", city="Orlando"),
    ),
    case(
        "types of the schema",
        "vllm qwen3coder",
        coder("types", i="42", f="3.14", n="7", b="true", s="hello world", o='{"key": "value"}', a='["a", 1]'),
        call("types", i=42, f=3.14, n=7, b=True, s="hello world", o={"key": "value"}, a=["a", 1]),
    ),
    case(
        "values that aren't their type",
        "vllm qwen3coder",
        coder("types", i="many", f="NaN", b="yes", o="{oops", a="none"),
        call("types", i="many", f="NaN", b="yes", o="{oops", a=None),
    ),
    case(
        "null",
        "vllm qwen3coder",
        coder("types", maybe="None", s="null", i="null", number_or_null="null"),
        call("types", maybe=None, s="null", i=None, number_or_null=None),
    ),
    case(
        "no null where a string is wanted first",
        "vllm qwen3coder",
        coder("types", either="null"),
        call("types", either="null"),
    ),
    case(
        "text after",
        "-",
        coder("get_weather", city="Dallas", state="TX") + "\nBye.",
        call("get_weather", city="Dallas", state="TX"),
        says="\nBye.",
    ),
    case(
        "nullable with a value",
        "vllm qwen3coder",
        coder("types", maybe="x", number_or_null="1.5"),
        call("types", maybe="x", number_or_null=1.5),
    ),
    case(
        "python literals",
        "vllm qwen3coder",
        coder("types", o="{'k': True}", a="('a', 1)", b="True"),
        call("types", o={"k": True}, a="('a', 1)", b=True),
    ),
    case(
        "no markers around the function",
        "vllm qwen3coder fallback",
        "<function=get_weather>\n<parameter=city>\nDallas\n</parameter>\n</function>",
        call("get_weather", city="Dallas"),
    ),
    case(
        "no parameters",
        "sglang qwen3_coder",
        "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        call("get_time"),
    ),
    case(
        "a parameter left open",
        "vllm qwen3coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nDallas\n<parameter=state>\nTX\n</parameter>\n</function>\n</tool_call>",
        call("get_weather", city="Dallas", state="TX"),
    ),
    case(
        "the last one left open",
        "vllm qwen3coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nDallas\n</function>\n</tool_call>",
        call("get_weather", city="Dallas"),
    ),
    case(
        "all on one line",
        "sglang qwen3_coder",
        "<tool_call><function=area><parameter=shape>disc</parameter><parameter=precision>3</parameter></function></tool_call>",
        call("area", shape="disc", precision=3),
    ),
    case(
        "markup, quotes and empty lines in a value",
        "vllm qwen3coder",
        coder("search", query='\n<b>"x"</b>\n\\n &amp; <parameter\n'),
        call("search", query='\n<b>"x"</b>\n\\n &amp; <parameter\n'),
    ),
    case(
        "an empty value",
        "sglang qwen3_coder",
        "<tool_call><function=search><parameter=query>\n</parameter></function></tool_call>",
        call("search", query=""),
    ),
    case("no schema", "vllm qwen3coder", coder("anything", x="1"), call("anything", x="1"), tools=None),
    case("a parameter that the schema lacks", "vllm qwen3coder", coder("search", depth="3"), call("search", depth="3")),
    case(
        "cut off in the closing marker",
        "-",
        "<tool_call>\n<function=get_time>\n</function>\n</tool_c",
        call("get_time"),
        tools=None,
    ),
    case(
        "cut off in a value",
        "vllm qwen3coder",
        "<tool_call>\n<function=search>\n<parameter=query>\nhow to",
        ("search", '{"query": "how to'),
    ),
    case(
        "cut off in a number", "-", "<tool_call>\n<function=search>\n<parameter=limit>\n12", ("search", '{"limit": "12')
    ),
    plain("cut off in the name", "-", "<tool_call>\n<function=sea"),
    plain("no function in the markers", "vllm qwen3coder", "<tool_call>\nwell\n</tool_call>"),
    case(
        "reasoning before",
        "vllm qwen3",
        "<think>hm\n" + coder("get_time", zone="CET"),
        call("get_time", zone="CET"),
        format="qwen3+qwen3_coder",
        thinks="hm\n",
    ),
]
