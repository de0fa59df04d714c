"""Calls whose arguments stand between tags: GLM-4.5's and MiniMax-M2's."""

from tests.server.parsers.cases import TOOLS, call, cases_of


def glm(name: str, **arguments: str) -> str:
    body = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>{name}\n{body}</tool_call>"


def minimax(*calls: tuple[str, dict[str, str]]) -> str:
    body = ""
    for name, arguments in calls:
        said = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items())
        body += f'<invoke name="{name}">\n{said}</invoke>\n'
    return f"<minimax:tool_call>\n{body}</minimax:tool_call>"


case, plain = cases_of("glm45", TOOLS)
TAGGED = [
    plain("no call", "vllm glm4_moe", "A plain answer."),
    case("one call, text before", "vllm glm4_moe", "Let me look.\n" + glm("get_weather", city="東京"),
         call("get_weather", city="東京"), says="Let me look.\n"),
    case("two calls", "vllm glm4_moe", glm("get_time", zone="CET") + "\n" + glm("search", query="a b", limit="3"),
         call("get_time", zone="CET"), call("search", query="a b", limit=3)),
    case("types of the schema", "sglang glm4_moe",
         glm("types", i="1", n="2.5", b="true", s="3", o='{"k": []}', a="[1]", maybe="null"),
         call("types", i=1, n=2.5, b=True, s="3", o={"k": []}, a=[1], maybe=None)),
    case("no arguments, no newline", "vllm glm4_moe", "<tool_call>get_time</tool_call>", call("get_time")),
    case("a closing tag in a value", "-", glm("search", query="<arg_value>x</arg_value> y", limit="1"),
         call("search", query="<arg_value>x</arg_value> y", limit=1)),
    case("lines in a value", "sglang glm4_moe", glm("search", query="a\n\nb\n"), call("search", query="a\n\nb\n")),
    case("nothing closed, another call", "-",
         "<tool_call>search\n<arg_key>query</arg_key><arg_value>x</arg_value>\n" + glm("get_time"),
         call("search", query="x"), call("get_time")),
    case("cut off in a value", "-", "<tool_call>search<arg_key>query</arg_key><arg_value>x",
         ("search", '{"query": "x')),
    case("a key without a value", "-", "<tool_call>search<arg_key>query</arg_key></tool_call>ok",
         call("search", query=None), says="ok"),
    plain("not a call", "-", "<tool_call>is a tag</tool_call>"),
    case("behind reasoning", "vllm glm4_moe", "<think>hm</think>\n" + glm("get_time"), call("get_time"), thinks="hm",
         format="think+glm45"),
    case("a call ends open reasoning", "sglang glm45", "<think>hm\n" + glm("get_weather", city="Oslo"),
         call("get_weather", city="Oslo"), thinks="hm\n", format="glm45+glm45"),
    case("a call mentioned in reasoning", "-", "<think>a <tool_call>tag</think>" + glm("get_time"), call("get_time"),
         thinks="a <tool_call>tag", format="glm45+glm45"),
]  # fmt: skip

case, plain = cases_of("minimax_m2", TOOLS)
TAGGED += [
    case("one call, text before", "vllm minimax_m2", "Look: " + minimax(("get_weather", {"city": "Oslo"})),
         call("get_weather", city="Oslo"), says="Look: "),
    case("two calls in a section", "vllm minimax_m2",
         minimax(("search", {"query": '{"a": 1}', "limit": "7"}), ("get_time", {})),
         call("search", query='{"a": 1}', limit=7), call("get_time")),
    case("a closing tag in a value", "-", minimax(("search", {"query": "x</parameter>y"})),
         call("search", query="x</parameter>y")),
    case("lines around a value", "-", minimax(("search", {"query": "\n a\n"})), call("search", query="\n a\n")),
    case("cut off", "-", '<minimax:tool_call>\n<invoke name="search">\n<parameter name="limit">4',
         ("search", '{"limit": "4')),
    plain("a section of text", "-", "<minimax:tool_call>\nnothing\n</minimax:tool_call>"),
]  # fmt: skip
