"""gpt-oss' messages."""

from tests.server.parsers.cases import Case, call

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"


def harmony(name: str, arguments: str, kind: str = " <|constrain|>json") -> str:
    return f"<|start|>assistant<|channel|>commentary to=functions.{name}{kind}<|message|>{arguments}<|call|>"


HARMONY = [
    Case("final alone", "vllm openai", "harmony", "<|channel|>final<|message|>A test<|return|>", None, "A test"),
    Case(
        "analysis, final",
        "llama.cpp gpt-oss",
        "gpt_oss",
        f"{ANALYSIS}Let me think...{FINAL}It is 42<|end|>",
        "Let me think...",
        "It is 42",
    ),
    Case(
        "no end token", "llama.cpp gpt-oss", "harmony", f"{ANALYSIS}Where?{FINAL}Which city?", "Where?", "Which city?"
    ),
    Case("end token between", "vllm gptoss", "harmony", f"{ANALYSIS}hm<|end|>{FINAL}So.", "hm", "So."),
    Case("analysis alone", "vllm gptoss", "harmony", f"{ANALYSIS}hm<|end|>", "hm"),
    Case("header cut off", "vllm gptoss", "harmony", f"{ANALYSIS}hm<|end|><|start|>assistant<|channel|>final", "hm"),
    Case(
        "constrained final",
        "vllm gptoss",
        "harmony",
        f"{ANALYSIS}hm<|end|><|start|>assistant<|channel|>final <|constrain|>JSON <|message|>{{}}",
        "hm",
        "{}",
    ),
    Case(
        "no assistant tag", "vllm gptoss", "harmony", f"{ANALYSIS}hm<|end|><|channel|>final<|message|>So.", "hm", "So."
    ),
    Case(
        "one call",
        "vllm openai",
        "harmony",
        f"{ANALYSIS}hm<|end|>" + harmony("get_weather", '{"city": "Oslo"}'),
        "hm",
        calls=(call("get_weather", city="Oslo"),),
    ),
    Case(
        "newlines in the arguments",
        "vllm openai",
        "harmony",
        harmony("get_weather", '{\n"city": "Oslo"\n}'),
        calls=(call("get_weather", city="Oslo"),),
    ),
    Case(
        "many calls",
        "vllm openai",
        "harmony",
        ANALYSIS
        + "hm<|end|>"
        + harmony("a", '{"x": 1}')
        + harmony("b", '{"x": 1}', "")
        + harmony("c", "foo", "")
        + harmony("d", "{}")
        + harmony("e", ""),
        "hm",
        calls=(call("a", x=1), call("b", x=1), ("c", "foo"), call("d"), call("e")),
    ),
    Case(
        "call and final",
        "vllm openai",
        "harmony",
        harmony("a", "{}") + FINAL + "Done.<|return|>",
        None,
        "Done.",
        (call("a"),),
    ),
    Case(
        "recipient in the role",
        "harmony guide",
        "harmony",
        ' to=functions.a<|channel|>commentary <|constrain|>json<|message|>{"x": 1}<|call|>',
        calls=(call("a", x=1),),
    ),
    Case(
        "preamble",
        "harmony guide",
        "harmony",
        "<|channel|>commentary<|message|>First I look.<|end|>" + harmony("a", "{}"),
        None,
        "First I look.",
        (call("a"),),
    ),
    Case(
        "built-in tool",
        "vllm openai",
        "harmony",
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        "print(1)",
    ),
    Case(
        "two analyses",
        "vllm openai",
        "harmony",
        f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>{FINAL}c",
        "a\nb",
        "c",
    ),
    Case("no markup at all", "-", "harmony", "So.", None, "So."),
    Case("cut off in the arguments", "-", "harmony", harmony("a", '{"x": ')[:-8], calls=(("a", '{"x": '),)),
]
