"""gpt-oss' messages."""

from tests.server.parsers.cases import call, cases_of

case, plain = cases_of("harmony")

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"


def harmony(name: str, arguments: str, kind: str = " <|constrain|>json") -> str:
    return f"<|start|>assistant<|channel|>commentary to=functions.{name}{kind}<|message|>{arguments}<|call|>"


HARMONY = [
    case("final alone", "vllm openai", "<|channel|>final<|message|>A test<|return|>", says="A test"),
    case("analysis, final", "llama.cpp gpt-oss", f"{ANALYSIS}Let me think...{FINAL}It is 42<|end|>", format="gpt_oss",
         thinks="Let me think...", says="It is 42"),
    case("no end token", "llama.cpp gpt-oss", f"{ANALYSIS}Where?{FINAL}Which city?", thinks="Where?",
         says="Which city?"),
    case("end token between", "vllm gptoss", f"{ANALYSIS}hm<|end|>{FINAL}So.", thinks="hm", says="So."),
    case("analysis alone", "vllm gptoss", f"{ANALYSIS}hm<|end|>", thinks="hm"),
    case("header cut off", "vllm gptoss", f"{ANALYSIS}hm<|end|><|start|>assistant<|channel|>final", thinks="hm"),
    case("constrained final", "vllm gptoss",
         f"{ANALYSIS}hm<|end|><|start|>assistant<|channel|>final <|constrain|>JSON <|message|>{{}}", thinks="hm",
         says="{}"),
    case("no assistant tag", "vllm gptoss", f"{ANALYSIS}hm<|end|><|channel|>final<|message|>So.", thinks="hm",
         says="So."),
    case("one call", "vllm openai", f"{ANALYSIS}hm<|end|>" + harmony("get_weather", '{"city": "Oslo"}'),
         call("get_weather", city="Oslo"), thinks="hm"),
    case("newlines in the arguments", "vllm openai", harmony("get_weather", '{\n"city": "Oslo"\n}'),
         call("get_weather", city="Oslo")),
    case("many calls", "vllm openai", ANALYSIS + "hm<|end|>" + harmony("a", '{"x": 1}') + harmony("b", '{"x": 1}', "")
         + harmony("c", "foo", "") + harmony("d", "{}") + harmony("e", ""), call("a", x=1), call("b", x=1),
         ("c", "foo"), call("d"), call("e"), thinks="hm"),
    case("call and final", "vllm openai", harmony("a", "{}") + FINAL + "Done.<|return|>", call("a"), says="Done."),
    case("recipient in the role", "harmony guide",
         ' to=functions.a<|channel|>commentary <|constrain|>json<|message|>{"x": 1}<|call|>', call("a", x=1)),
    case("preamble", "harmony guide", "<|channel|>commentary<|message|>First I look.<|end|>" + harmony("a", "{}"),
         call("a"), says="First I look."),
    case("built-in tool", "vllm openai", "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
         thinks="print(1)"),
    case("two analyses", "vllm openai", f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>{FINAL}c",
         thinks="a\nb", says="c"),
    plain("no markup at all", "-", "So."),
    case("cut off in the arguments", "-", harmony("a", '{"x": ')[:-8], ("a", '{"x": ')),
]  # fmt: skip
