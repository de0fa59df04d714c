"""Command lines of vLLM's and SGLang's, as their users have them, and what they are here."""

import shlex
import sys

import pytest

from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.flags import engine_options
from jaxspec.config.foreign_flags import ELSEWHERE, NEEDLESS, SEVERAL_GPUS, UNSUPPORTED
from server.cli.options import UsageError, parse


def answer(line):
    """Read the error about a command line: the translation's words, and what it leaves out."""
    with pytest.raises(UsageError) as error:
        parse(shlex.split(line))
    before, _, after = str(error.value).partition("In jaxspec's flags:\n  ")
    command, *left = after.split("\n")
    assert before and command.startswith("python -m server")
    EngineConfig(**engine_options(parse(shlex.split(command)[3:])))
    return command.removeprefix("python -m server").strip(), left


def test_the_command_is_the_one_that_was_typed(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/jaxspec serve", "--max-model-len", "9"])
    with pytest.raises(UsageError, match=r"\n  jaxspec serve --context-length 9$"):
        parse(sys.argv[1:])


VLLM = "vllm serve Qwen/Qwen3-8B"
SGLANG = "python -m sglang.launch_server --model-path Qwen/Qwen3-8B"
HERE = "--model Qwen/Qwen3-8B"


@pytest.mark.parametrize("line,here", [
    (f"{VLLM} --port 9", f"{HERE} --port 9"),
    (f"{VLLM} --tensor-parallel-size 1 --max-model-len 8192 --speculative-config "
     ''''{"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3}' ''',
     f"{HERE} --context-length 8192 --draft eagle3:a/b --num-draft-tokens 3 --port 8000"),
    (f"CUDA_VISIBLE_DEVICES=0 {VLLM} -tp 1 --enforce-eager --gpu-memory-utilization=0.8",
     f"{HERE} --mem-fraction-static 0.8 --port 8000"),
    (f"VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 A=2 {VLLM} --max-model-len 65535",
     f"{HERE} --context-length 65535 --allow-longer-context --port 8000"),
    (f"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=true {SGLANG} --context-length 65535",
     f"{HERE} --context-length 65535 --allow-longer-context"),
    (f"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=0 {SGLANG}", HERE),
    (f'''{VLLM} --speculative-config='{{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4}}' ''',
     f"{HERE} --draft 'ngram?max_match=4' --num-draft-tokens 5 --port 8000"),
    (f'''{VLLM} --speculative-config '{{"model":"a/b","num_speculative_tokens":5}}' ''',
     f"{HERE} --draft a/b --num-draft-tokens 5 --port 8000"),
    (f'''{VLLM} --speculative-config '{{"method":"qwen3_next_mtp","num_speculative_tokens":2}}' ''',
     f"{HERE} --draft mtp --num-draft-tokens 2 --port 8000"),
    (f'''{VLLM} --speculative_config '{{"method":"draft_model","model":"a/b"}}' --max-num-seqs 4''',
     f"{HERE} --max-running-requests 4 --draft standalone:a/b --port 8000"),
    (f'''{VLLM} --speculative-config='{{"method":"suffix","num_speculative_tokens":16,'''
     '''"suffix_decoding_max_tree_depth":32,"suffix_decoding_min_token_prob":0.2}' ''',
     f"{HERE} --draft 'suffix?max_depth=32&min_prob=0.2' --num-draft-tokens 16 --port 8000"),
    (f"{VLLM} --speculative-model [ngram] --num-speculative-tokens 4 --generation-config vllm",
     f"{HERE} --sampling-defaults openai --draft ngram --num-draft-tokens 4 --port 8000"),
    (f"{VLLM} --no-enable-prefix-caching --kv-cache-dtype fp8 --dtype half --block-size 32",
     f"{HERE} --disable-prefix-cache --kv-cache-dtype fp8 --dtype half --page-size 32 --port 8000"),
    ("python3 -m vllm.entrypoints.openai.api_server --model a/b --host 0.0.0.0 --port 1",
     "--model a/b --host 0.0.0.0 --port 1"),
    (f"{SGLANG} --tp-size 1 --speculative-algorithm EAGLE3 --speculative-draft-model-path a/b "
     "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
     f"{HERE} --draft eagle3:a/b --num-draft-tokens 3"),
    (f"{SGLANG} --speculative-algorithm EAGLE3 --speculative-draft-model-path a/b "
     "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16",
     f"{HERE} --draft eagle3:a/b --topk 4 --num-steps 5 --num-draft-tokens 15"),
    (f"{SGLANG} --speculative-algorithm STANDALONE --speculative-draft-model-path a/b "
     "--speculative-draft-model-quantization fp8", f"{HERE} --draft standalone:a/b --draft-quantization fp8"),
    (f"{SGLANG} --speculative-algorithm EAGLE3 --speculative-draft-model-path a/b --quantization fp8 "
     "--speculative-draft-model-quantization unquant", f"{HERE} --quantization fp8 --draft eagle3:a/b"),
    (f"""{VLLM} --speculative-config '{{"method":"eagle3","model":"a/b","quantization":"fp8"}}' """,
     f"{HERE} --draft eagle3:a/b --draft-quantization fp8 --port 8000"),
    (f"{SGLANG} --speculative-algorithm NEXTN --speculative-num-steps 3", f"{HERE} --draft mtp --num-draft-tokens 3"),
    (f"{SGLANG} --speculative-algorithm EAGLE --speculative-num-steps 3", f"{HERE} --draft mtp --num-draft-tokens 3"),
    (f"{SGLANG} --speculative-algorithm NGRAM --speculative-num-draft-tokens 8 --disable-radix-cache",
     f"{HERE} --disable-prefix-cache --draft ngram --num-draft-tokens 7"),
    (f"{SGLANG} --speculative-algorithm STANDALONE --speculative-draft-model-path a/b --mem-fraction-static 0.7",
     f"{HERE} --mem-fraction-static 0.7 --draft standalone:a/b"),
    (f"{SGLANG} --speculative-algorithm DFLASH --speculative-draft-model-path a/b --trust-remote-code",
     f"{HERE} --draft dflash:a/b"),
    ("sglang serve --model-path a/b --chunked-prefill-size -1 --load-format safetensors", "--model a/b"),
    (f"{SGLANG} --tool-call-parser qwen25 --reasoning-parser deepseek-r1",
     f"{HERE} --tool-call-parser qwen25 --reasoning-parser deepseek_r1"),
    (f"{SGLANG} --dp 4 --tp 2", f"{HERE} --dp-size 4 --tp-size 2"),
    (f"{VLLM} --data-parallel-size 2 -tp 1", f"{HERE} --dp-size 2 --port 8000"),
    ("a/b --max-model-len 99", "--model a/b --context-length 99"),
    (f"{VLLM} --max-model-len 4k", f"{HERE} --context-length 4000 --port 8000"),
    (f"{VLLM} --max-model-len 4K --max-num-batched-tokens 2.5k --max-num-seqs 1k",
     f"{HERE} --context-length 4096 --chunked-prefill-size 2500 --max-running-requests 1000 --port 8000"),
    (f"{VLLM} --api-key one two --served-model-name x y z --port 9",
     f"{HERE} --api-key one --served-model-name x --port 9"),
    (f"{VLLM} --speculative-config.method eagle3 --speculative-config.model a/b "
     "--speculative-config.num-speculative-tokens 3",
     f"{HERE} --draft eagle3:a/b --num-draft-tokens 3 --port 8000"),
    (f"""{VLLM} -sc '{{"method":"ngram","num_speculative_tokens":5}}' -sc.prompt_lookup_max=4""",
     f"{HERE} --draft 'ngram?max_match=4' --num-draft-tokens 5 --port 8000"),
    ("a/b --max-model-len 99 --tool-call-parser llama4_pythonic", "--model a/b --context-length 99"),
    (f"{VLLM} --disable-prefix-cache=true --trust-remote-code=True", f"{HERE} --disable-prefix-cache --port 8000"),
])  # fmt: skip
def test_translations(line, here):
    assert answer(line)[0] == here


@pytest.mark.parametrize("flags,said", [
    ("--torchao-config int4wo", "--torchao-config: weights are quantised by --quantization fp8"),
    ("--enable-lora --lora-modules a=b", "--enable-lora: LoRA"),
    ("--pipeline-parallel-size 2", "--pipeline-parallel-size 2: of several GPUs, --tp-size, --ep-size"),
    ("--enable-dp-attention", "--enable-dp-attention: attention is divided by heads (--tp-size)"),
    ("--load-balance-method shortest_queue", "--load-balance-method: --dp-size engines run on this host"),
    ("--kv-cache-dtype fp8_e5m2", "--kv-cache-dtype fp8_e5m2: must be one of auto, float32"),
    ("--speculative-config nonsense", "--speculative-config 'nonsense': it isn't a JSON object"),
    ("""--speculative-config '{"method": "medusa"}'""", "speculation by 'medusa': the methods are dflash, "),
    ("""--speculative-config '{"quantization": "awq"}'""", "a drafter quantised by 'awq': fp8 can be made"),
    ("--enforce-eager", "--enforce-eager: every step is one compiled program"),
    ("--reasoning-parser kimi_k9", "--reasoning-parser kimi_k9: it may be auto, none, qwen3"),
    ("--made-up 3", "--made-up: it has no counterpart here"),
    ("--quantization awq", "--quantization awq: such a checkpoint is read by its config, without a flag"),
    ("-q gptq_marlin", "--quantization gptq_marlin: such a checkpoint is read by its config"),
    ("--quantization compressed-tensors", "--quantization compressed-tensors: such a checkpoint is read by its"),
    ("--quantization bitsandbytes", "--quantization bitsandbytes: must be one of none, fp8, got 'bitsandbytes'"),
    ("--quantization", "--quantization: it came without a value"),
    ("--max-model-len", "--max-model-len: it came without a value"),
    ("--max-model-len -1", "--context-length -1: it is the model's anyway"),
    ("--max-model-len auto", "--context-length auto: it is the model's anyway"),
    ("--max-model-len 4x", "--context-length 4x: invalid int value: '4x'"),
    ("--speculative-config", "--speculative-config: it came without a value"),
    ("-sc", "--speculative-config: it came without a value"),
    ("""--speculative-config '{"method": ["eagle3"], "model": {"a": 1}}' --made-up""", "--made-up: it has no"),
    ("--kv-cache-dtype", "--kv-cache-dtype: it came without a value"),
    ("--tool-call-parser llama4_pythonic", "--tool-call-parser llama4_pythonic: it may be auto, none, hermes"),
    ("--tool-call-parser", "--tool-call-parser: it came without a value"),
    ("--gpu-memory-utilization 1.0", "--mem-fraction-static 1.0: must be between 0 and 1, got 1.0"),
    ("--dtype int8", "--dtype int8: must be one of auto, float32"),
    ("--max-num-seqs 0", "--max-running-requests 0: must be an integer of at least 1"),
    ("--random-seed=-1", "--seed=-1: must be an integer of at least 0"),
    ("--api-key=", "--api-key: it came without a value"),
    ("--speculative-num-draft-tokens auto", "--num-draft-tokens auto: invalid int value"),
    ("--no-enable-prefix-caching=false --made-up", "--made-up: it has no"),
    ("--compilation-config.level 3", "--compilation-config.level: every step is one compiled program"),
    ("--quantization.level fp8", "--quantization.level: it has no counterpart here"),
    ("--speculative-config.a 1 --speculative-config.a.b [[ --made-up", "--made-up: it has no counterpart"),
    ("--speculative-config.method medusa", "speculation by 'medusa': the methods are"),
    ("--help", "--help: give it alone"),
])  # fmt: skip
def test_what_a_translation_leaves_out_is_said(flags, said):
    command, left = answer(f"{VLLM} {flags}")
    assert command == f"{HERE} --port 8000"
    assert left[0].startswith(f"left out: {said}")


def test_of_several_values_the_others_are_told():
    command, left = answer(f"{VLLM} --api-key one two --served-model-name x y --lora-modules a=b c=d")
    assert command == f"{HERE} --api-key one --served-model-name x --port 8000"
    assert left[:2] == [
        "left out: --api-key two: there can be but one here",
        "left out: --served-model-name y: there can be but one here",
    ]
    assert len(left) == 3 and left[2].startswith("left out: --lora-modules: LoRA")


def test_what_is_missing_for_several_hosts_is_told():
    with pytest.raises(UsageError) as error:
        parse(shlex.split(f"{VLLM} -tp 4 -n 2 -r 1 --master-addr 10.0.0.1"))
    assert "--tp-size 4 --nnodes 2 --node-rank 1 --port 8000\n" in str(error.value)
    assert str(error.value).endswith("to be changed: --nnodes 2 needs --dist-init-addr HOST:PORT, where node 0 is")


@pytest.mark.parametrize("flag", sorted({*ELSEWHERE, *SEVERAL_GPUS, *NEEDLESS, *UNSUPPORTED}))
def test_whatever_a_flag_of_theirs_has_for_a_value(flag):
    """Check, with `answer`, that printed commands parse, and drop nothing silently but what is so here anyway."""
    for value in ("", "=", " -1", " auto", " 4k", " none a/c", " 1", "=true"):
        command, left = answer(f"{VLLM} --{flag.replace('_', '-')}{value}")
        here = ELSEWHERE.get(flag, "nothing").replace("_", "-")
        assert left or f"--{here}" in command or value in (" 1", "=true"), value
