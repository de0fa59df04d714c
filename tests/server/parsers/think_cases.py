"""Reasoning: what comes before the answer."""

from tests.server.parsers.cases import BASH, Case

THINK = [
    Case("no opening marker", "vllm qwen3", "qwen3", "hm, so</think>It is.", "hm, so", "It is.", thinking="prompt"),
    Case("reasoning alone", "vllm qwen3", "qwen3", "hm, so</think>", "hm, so", thinking="prompt"),
    Case("both markers", "vllm qwen3", "qwen3", "<think>hm, so</think>It is.", "hm, so", "It is."),
    Case(
        "both markers, prompt too", "vllm qwen3", "qwen3", "<think>hm</think>It is.", "hm", "It is.", thinking="prompt"
    ),
    Case("cut off in reasoning", "vllm qwen3", "qwen3", "hm, so", "hm, so", thinking="prompt"),
    Case("cut off after the marker", "vllm qwen3", "qwen3", "<think>hm, so", "hm, so"),
    Case("complete, no answer", "vllm qwen3", "qwen3", "<think>hm, so</think>", "hm, so"),
    Case("several lines", "vllm qwen3", "qwen3", "<think>a\nb</think>c\nd", "a\nb", "c\nd"),
    Case("thinking off", "vllm qwen3", "qwen3", "Just an answer.", None, "Just an answer.", thinking="off"),
    Case("thinking off, call", "vllm qwen3", "qwen3", "Look.\n\n" + BASH, None, "Look.\n\n" + BASH, thinking="off"),
    Case("thinking off, marker", "vllm qwen3", "qwen3", "<think>a</think>b", None, "<think>a</think>b", thinking="off"),
    Case("no reasoning", "sglang qwen3", "qwen3", "Just an answer.", None, "Just an answer."),
    Case("call ends open reasoning", "vllm qwen3", "qwen3", "Look.\n\n" + BASH, "Look.\n\n", BASH, thinking="prompt"),
    Case("call ends reasoning with marker", "vllm qwen3", "qwen3", "<think>Look.\n\n" + BASH, "Look.\n\n", BASH),
    Case("marker mentioned", "-", "qwen3", "<think>no <tool_call> yet</think>So.", "no <tool_call> yet", "So."),
    Case("closing marker mentioned", "vllm qwen3", "qwen3", "<think>after </think> I", "after ", " I"),
    Case("closed twice", "vllm qwen3", "qwen3", "<think>a</think>b</think>c", "a", "b</think>c"),
    Case("whitespace is kept", "vllm deepseek_r1", "qwen3", "<think>\nhm\n</think>\n\nSo.", "\nhm\n", "\n\nSo."),
    Case("empty block", "qwen3 template", "qwen3", "<think>\n\n</think>\n\nSo.", "\n\n", "\n\nSo."),
    Case("later markers are text", "-", "qwen3", "Write <think>x</think>.", None, "Write <think>x</think>."),
    Case("close to a marker", "sglang base", "qwen3", "<thin air>", None, "<thin air>"),
    Case("close to the closing one", "sglang base", "think", "<think>a </thin b</think>c", "a </thin b", "c"),
    Case("simple", "vllm deepseek_r1", "deepseek_r1", "hm, so</think>It is.", "hm, so", "It is."),
    Case("no end", "vllm deepseek_r1", "deepseek_r1", "hm, so", "hm, so"),
    Case("shortest", "vllm deepseek_r1", "deepseek_r1", "</think>It is.", None, "It is."),
    Case("opened and closed", "vllm deepseek_r1", "deepseek_r1", "<think>hm</think>It is.", "hm", "It is."),
    Case("nothing", "vllm deepseek_r1", "deepseek_r1", ""),
    Case("newlines", "vllm deepseek_r1", "deepseek_r1", "\n<think>hm</think>\nIt is.", "hm", "\nIt is."),
    Case("newline without a marker", "-", "deepseek_r1", "\nhm</think>So.", "\nhm", "So."),
    Case("generic, plain", "sglang olmo3", "think", "Plain.", None, "Plain."),
    Case("generic, cut off", "sglang olmo3", "think", "<think>half a thou", "half a thou"),
    Case("generic, split marker", "sglang olmo3", "think", "<think>Thinking...</think>So.", "Thinking...", "So."),
    Case("forced open", "llama.cpp reasoning", "think", "Cogito</think>sum", "Cogito", "sum", thinking="prompt"),
    Case("not forced open", "llama.cpp reasoning", "think", "Cogito</think>sum", None, "Cogito</think>sum"),
    Case("magistral", "vllm mistral", "mistral+mistral", "[THINK]hm[/THINK]So.", "hm", "So."),
    Case("magistral, plain", "vllm mistral", "mistral+mistral", "So.", None, "So."),
]
