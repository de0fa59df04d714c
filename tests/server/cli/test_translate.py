"""Command lines of vLLM's and SGLang's, as their users have them, and what they are here."""

import json
import shlex
import sys

import pytest

from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.flags import engine_options
from jaxspec.config.foreign_flags import ELSEWHERE, NEEDLESS, SEVERAL_GPUS, UNSUPPORTED
from server.cli.options import UsageError, parse
from tests.support.tiny import tiny_config


def answer(line):
    """Read the error about a command line: the translation's words, and what it leaves out."""
    with pytest.raises(UsageError) as error:
        parse(shlex.split(line))
    before, _, after = str(error.value).partition("In jaxspec's flags:\n  ")
    command, *left = after.split("\n")
    environment, launcher, flags = command.partition("python -m server")
    assert before and launcher
    EngineConfig(**engine_options(parse(shlex.split(flags))))
    return environment + flags.strip(), left


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
    (f"CUDA_VISIBLE_DEVICES=0 HF_HOME='a b' {VLLM} -tp 1 --enforce-eager --gpu-memory-utilization=0.8",
     f"CUDA_VISIBLE_DEVICES=0 HF_HOME='a b' {HERE} --mem-fraction-static 0.8 --port 8000"),
    (f"""{VLLM} --limit-mm-per-prompt '{{"image": 4, "video": 0}}' --allowed-local-media-path /tmp """
     "--allowed-media-domains a.example b.example",
     f"""{HERE} --limit-images-per-prompt 4 --limit-videos-per-prompt 0 --allowed-media-path /tmp """
     """--allowed-media-domains '["a.example", "b.example"]' --port 8000"""),
    (f"{VLLM} --limit-mm-per-prompt.image 0", f"{HERE} --limit-images-per-prompt 0 --port 8000"),
    (f"""{VLLM} --limit-mm-per-prompt '{{"video": {{"count": 2}}}}'""",
     f"{HERE} --limit-videos-per-prompt 2 --port 8000"),
    (f"{VLLM} --limit-mm-per-prompt image=2", f"{HERE} --limit-images-per-prompt 2 --port 8000"),
    (f"""{SGLANG} --limit-mm-data-per-request '{{"image": 3}}'""", f"{HERE} --limit-images-per-prompt 3"),
    (f"{VLLM} --kv-offloading-size 64", f"{HERE} --host-kv-gb 64 --port 8000"),
    (f"{SGLANG} --tp 2 --hicache-size 100", f"{HERE} --tp-size 2 --host-kv-gb 186.3"),
    (f"""{VLLM} --kv-transfer-config '{{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": """
     f"""{{"cpu_bytes_to_use": {2**36}}}}}'""", f"{HERE} --host-kv-gb 64 --port 8000"),
    (f"{VLLM} --scheduling-policy priority", f"{HERE} --schedule-policy priority --port 8000"),
    (f"{SGLANG} --schedule-policy fcfs --enable-priority-scheduling", f"{HERE} --schedule-policy priority-high-first"),
    (f"{SGLANG} --enable-priority-scheduling --schedule-low-priority-values-first",
     f"{HERE} --schedule-policy priority"),
    (f"SGLANG_ENABLE_SPEC_V2=0 {SGLANG}", f"{HERE} --disable-overlap"),
    (f"env SGLANG_ENABLE_SPEC_V2=False {SGLANG}", f"{HERE} --disable-overlap"),
    (f"{SGLANG} --speculative-algo NGRAM --mem-fraction 0.7 --max-running 4",
     f"{HERE} --mem-fraction-static 0.7 --max-running-requests 4 --draft ngram"),
    ("a/b --speculative-algo NGRAM", "--model a/b --draft ngram"),
    (f"{SGLANG} --speculative-algorithm NAIVE_EAGLE --speculative-draft-model-path a/b",
     f"{HERE} --draft eagle:a/b --num-draft-tokens 1"),
    (f"{SGLANG} --speculative-algorithm MEDUSA --speculative-draft-model-path a/b", f"{HERE} --draft a/b"),
    ("python -m sglang.launch_server --cuda-graph-bs 1 2 3 --model-path a/b", "--model a/b --batch-sizes 1,2,3"),
    ("python -m sglang.launch_server --made-up 1 2 3 --tp 2 --model-path a/b", "--model a/b --tp-size 2"),
    (f"{VLLM} --cudagraph-capture-sizes 1 2 4", f"{HERE} --batch-sizes 1,2,4 --port 8000"),
    (f"""{VLLM} -O3 --compilation-config '{{"cudagraph_capture_sizes": [1, 2]}}'""",
     f"{HERE} --batch-sizes 1,2 --port 8000"),
    (f"{VLLM} -cc.cudagraph_capture_sizes=[1,2] -O.level=3", f"{HERE} --batch-sizes 1,2 --port 8000"),
    (f"{SGLANG} --context 4096", f"{HERE} --context-length 4096"),
    (f"nohup uv run {VLLM} -tp 2", f"{HERE} --tp-size 2 --port 8000"),
    ("docker run --gpus device=0 -e HF_TOKEN=x -p 1:1 vllm/vllm-openai:v0.26 --model a/b --max-model-len 9",
     "HF_TOKEN=x --model a/b --context-length 9 --port 8000"),
    ("docker run -v a:b vllm-openai vllm serve a/b", "--model a/b --port 8000"),
    ("podman run -e SGLANG_ENABLE_SPEC_V2=0 lmsysorg/sglang:latest python3 -m sglang.launch_server --model-path a/b",
     "--model a/b --disable-overlap"),
    (f"{SGLANG} --piecewise-cuda-graph-tokens 256 512", f"{HERE} --prefill-sizes 256,512"),
    (f"{VLLM} -tp 4 --enable-expert-parallel", f"{HERE} --tp-size 4 --ep-size 4 --port 8000"),
    (f"{VLLM} --enable-expert-parallel", f"{HERE} --port 8000"),
    (f"{SGLANG} --tp 8 --dp 8 --enable-dp-attention", f"{HERE} --tp-size 8 --dp-attention"),
    (f"{SGLANG} --tp 8 --enable-dp-attention", f"{HERE} --tp-size 8"),
    (f"{VLLM} -tp 4 -n 2 -r 1 --master-addr 10.0.0.1",
     f"{HERE} --tp-size 4 --nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:29501 --port 8000"),
    (f"{VLLM} -tp 4 -n 2 --master-port 9 --master-addr 10.0.0.1",
     f"{HERE} --tp-size 4 --nnodes 2 --dist-init-addr 10.0.0.1:9 --port 8000"),
    (f"VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 A=2 {VLLM} --max-model-len 65535",
     f"A=2 {HERE} --context-length 65535 --allow-longer-context --port 8000"),
    (f"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=true {SGLANG} --context-length 65535",
     f"{HERE} --context-length 65535 --allow-longer-context"),
    (f"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=0 {SGLANG}", HERE),
    (f'''{VLLM} --speculative-config='{{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4}}' ''',
     f"{HERE} --draft 'ngram?max_match=4' --num-draft-tokens 5 --port 8000"),
    (f'''{VLLM} --speculative-config '{{"model":"a/b","num_speculative_tokens":5}}' ''',
     f"{HERE} --draft a/b --num-draft-tokens 5 --port 8000"),
    (f'''{VLLM} --speculative-config '{{"method":"qwen3_next_mtp","num_speculative_tokens":2}}' ''',
     f"{HERE} --draft mtp --num-draft-tokens 2 --port 8000"),
    (f'''{VLLM} --speculative-config '{{"method":"ernie_mtp","num_speculative_tokens":1}}' ''',
     f"{HERE} --draft mtp --num-draft-tokens 1 --port 8000"),
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
    (f"{SGLANG} --speculative-algorithm DFLASH --speculative-draft-model-path a/b "
     "--speculative-dflash-draft-window-size 9", f"{HERE} --draft 'dflash:a/b?window=9'"),
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
     f"{HERE} --api-key one --served-model-name x y z --port 9"),
    (f"{VLLM} --speculative-config.method eagle3 --speculative-config.model a/b "
     "--speculative-config.num-speculative-tokens 3",
     f"{HERE} --draft eagle3:a/b --num-draft-tokens 3 --port 8000"),
    (f"""{VLLM} -sc '{{"method":"ngram","num_speculative_tokens":5}}' -sc.prompt_lookup_max=4""",
     f"{HERE} --draft 'ngram?max_match=4' --num-draft-tokens 5 --port 8000"),
    ("a/b --max-model-len 99 --tool-call-parser llama4_pythonic", "--model a/b --context-length 99"),
    (f"VLLM_SERVER_DEV_MODE=1 {VLLM} --enable-sleep-mode", f"{HERE} --enable-rollout-routes --port 8000"),
    (f"{SGLANG} --admin-api-key secret", f"{HERE} --api-key secret"),
    (f"{SGLANG} --weight-loader-prefetch-checkpoints --weight-loader-prefetch-num-threads 2",
     f"{HERE} --load-threads 2"),
    (f"{VLLM} --model-loader-extra-config.num_threads=32", f"{HERE} --load-threads 32 --port 8000"),
    (f"{VLLM} --disable-prefix-cache=true --trust-remote-code=True", f"{HERE} --disable-prefix-cache --port 8000"),
])  # fmt: skip
def test_translations(line, here):
    assert answer(line)[0] == here


@pytest.mark.parametrize("flags,said", [
    ("--torchao-config int4wo", "--torchao-config: weights are quantised by --quantization fp8"),
    ("--lora-dtype auto", "--lora-dtype: adapters have the model's dtype"),
    ("""--model-loader-extra-config '{"enable_multithread_load": false, "num_threads": 4}'""",
     "--model-loader-extra-config: weights are read by --load-threads threads, of which there are 8"),
    ("""--model-loader-extra-config '{"enable_gds": false}'""", "--model-loader-extra-config: enable_gds has no"),
    ("--load-format fastsafetensors", "--load-format fastsafetensors: --load-threads threads read weights from"),
    ("--max-parallel-loading-workers 2", "--max-parallel-loading-workers: --load-threads threads read each device's"),
    ("--safetensors-load-strategy prefetch", "--safetensors-load-strategy: --load-threads threads read each"),
    ("--weight-loader-drop-cache-after-load", "--weight-loader-drop-cache-after-load: files aren't mapped"),
    ("--no-use-tqdm-on-load", "--no-use-tqdm-on-load: loading has a bar on a terminal, and lines in a log"),
    ("--enable-multimodal", "--enable-multimodal: pictures are read wherever the model has a vision tower"),
    ("""--limit-mm-per-prompt '{"audio": 1}'""", '--limit-mm-per-prompt {"audio": 1}: it names no number'),
    ("--mm-processor-kwargs '{}'", "--mm-processor-kwargs: the processor is as the checkpoint's"),
    ("--pipeline-parallel-size 2", "--pipeline-parallel-size 2: of several GPUs, --tp-size, --ep-size"),
    ("--enable-dp-attention", "--enable-dp-attention: it divides requests among --dp-size groups of GPUs, and there"),
    ("--load-balance-method shortest_queue", "--load-balance-method: --dp-size engines run on this host"),
    ("--kv-cache-dtype fp8_e5m2", "--kv-cache-dtype fp8_e5m2: must be one of auto, float32"),
    ("""--speculative-config '{"foo": 1}'""", "--speculative-config foo: it has no counterpart here"),
    ("""--speculative-config '{"num_speculative_tokens": [1]}'""",
     "--speculative-config num_speculative_tokens: it can't be [1]"),
    ("--speculative-config nonsense", "--speculative-config 'nonsense': it isn't a JSON object"),
    ("""--speculative-config '{"method": "medusa"}'""", "speculation by 'medusa': the methods are assistant, "),
    ("""--speculative-config '{"quantization": "awq"}'""", "a drafter quantised by 'awq': fp8, int4 or nvfp4 can"),
    ("--enforce-eager", "--enforce-eager: every step is one compiled program; --disable-jit"),
    ("--disable-cuda-graph", "--disable-cuda-graph: every step is one compiled program; --disable-jit"),
    ("--reasoning-parser kimi_k9", "--reasoning-parser kimi_k9: it may be auto, none, qwen3"),
    ("--made-up 3", "--made-up: it has no counterpart here"),
    ("--made-up 3 4 5", "--made-up: it has no counterpart here"),
    ("--enable-piecewise-cuda-graph", "--enable-piecewise-cuda-graph: every step is one compiled program"),
    ("--disable-piecewise-cuda-graph", "--disable-piecewise-cuda-graph: every step is one compiled program"),
    ("--enforce-piecewise-cuda-graph", "--enforce-piecewise-cuda-graph: every step is one compiled program"),
    ("--piecewise-cuda-graph-max-tokens 8000", "--piecewise-cuda-graph-max-tokens: every step is one compiled program"),
    ("--piecewise-cuda-graph-compiler eager", "--piecewise-cuda-graph-compiler: every step is one compiled program"),
    ("--cuda-graph-max-bs 128", "--cuda-graph-max-bs: every step is one compiled program, up to --max-running"),
    ("--enable-hierarchical-cache", "--enable-hierarchical-cache: --host-kv-gb GIB gives the cache a size"),
    ("--hicache-ratio 2", "--hicache-ratio: --host-kv-gb takes GiB"),
    ("--hicache-write-policy write_back", "--hicache-write-policy: pages are copied once they are full"),
    ("--hicache-storage-backend file", "--hicache-storage-backend: KV is kept on the device, in this host's memory"),
    ("--hicache-size much", "much: it names no size of a cache in the host's memory"),
    ("--kv-transfer-config {}", "--kv-transfer-config: prefill and decoding run in one process"),
    ("--cpu-offload-gb 4", "--cpu-offload-gb: weights stay on the device"),
    ("--sleep-on-idle", "--sleep-on-idle: the engine waits for requests without a loop"),
    ("--requests-all-greedy", "--requests-all-greedy: a batch of greedy requests"),
    ("--enable-mixed-chunk", "--enable-mixed-chunk: each step runs prompts and rounds, in a program of each"),
    ("--base-gpu-id 4", "--base-gpu-id: CUDA_VISIBLE_DEVICES in the environment chooses the GPUs"),
    ("--nccl-port 9", "--nccl-port: GPUs of one host need no port"),
    ("--speculative-draft-attention-backend fa4", "--speculative-draft-attention-backend: it is chosen from model"),
    ("--schedule-policy lpm", "--schedule-policy lpm: must be one of fcfs, priority, priority-high-first"),
    ("--schedule-low-priority-values-first", "--schedule-low-priority-values-first: it means something with"),
    ("--mamba-scheduler-strategy extra_buffer", "--mamba-scheduler-strategy: drafts, overlap and prefix cache of"),
    ("--batch-sizes 0", "--batch-sizes 0: must be integers of at least 1 with commas between, got '0'"),
    ("--quantization awq", "--quantization awq: such a checkpoint is read by its config, without a flag"),
    ("-q gptq_marlin", "--quantization gptq_marlin: such a checkpoint is read by its config"),
    ("--quantization compressed-tensors", "--quantization compressed-tensors: such a checkpoint is read by its"),
    ("--quantization bitsandbytes", "--quantization bitsandbytes: must be one of none, fp8, int4, nvfp4, got"),
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


def test_requests_are_divided_among_all_gpus_or_none():
    command, left = answer(f"{SGLANG} --tp 8 --dp 2 --enable-dp-attention")
    assert command == f"{HERE} --tp-size 8 --dp-attention"
    assert left == ["left out: --dp-size 2: --dp-attention divides requests among all 8 GPUs of --tp-size"]
    command, left = answer(f"{VLLM} --data-parallel-size 8 --enable-expert-parallel")
    assert command == f"{HERE} --dp-size 8 --port 8000"
    assert "--tp-size 8 --ep-size 8 --dp-attention in place of --dp-size 8" in left[0]


def test_a_disk_behind_the_hosts_memory_is_left_to_its_own_flags():
    config = {"kv_connector": "TieringOffloadingConnector"}
    config["kv_connector_extra_config"] = {"cpu_bytes_to_use": 2**31, "secondary_tiers": [{"type": "fs"}]}
    command, left = answer(f"{VLLM} --kv-transfer-config '{json.dumps(config)}'")
    assert command == f"{HERE} --host-kv-gb 2 --port 8000"
    assert left == ["left out: secondary_tiers: for a disk, give --disk-kv-gb GIB and --disk-kv-path DIR"]


def test_of_several_values_the_others_are_told():
    command, left = answer(f"{VLLM} --api-key one two --served-model-name x y --lora-modules a=b c=d")
    assert command == f"{HERE} --api-key one --served-model-name x y --lora-modules a=b c=d --port 8000"
    assert left == ["left out: --api-key two: there can be but one here"]


@pytest.mark.parametrize("line,here", [
    (f"{SGLANG} --enable-lora --lora-paths a=b c/d --max-loras-per-batch 4 --lora-target-modules q_proj v_proj",
     f"{HERE} --enable-lora --lora-modules a=b c/d=c/d --max-loras 4 --lora-target-modules q_proj v_proj"),
    (SGLANG + ''' --lora-paths '{"lora_name": "a", "lora_path": "b", "pinned": true}' --max-loaded-loras 9''',
     f"{HERE} --lora-modules a=b --max-cpu-loras 9"),
    (VLLM + ''' --enable-lora --lora-modules '{"name": "a", "path": "b", "base_model_name": "c"}' --max-lora-rank 64''',
     HERE + ''' --enable-lora --lora-modules '{"name": "a", "path": "b", "base_model_name": "c"}' --max-lora-rank 64'''
     " --port 8000"),
    (f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True {VLLM}", f"{HERE} --lora-root / --port 8000"),
])  # fmt: skip
def test_adapters_of_both_are_translated(line, here):
    assert answer(line) == (here, [])


def test_what_is_missing_for_several_hosts_is_told():
    with pytest.raises(UsageError) as error:
        parse(shlex.split(f"{VLLM} -tp 4 -n 2 -r 1"))
    assert "--tp-size 4 --nnodes 2 --node-rank 1 --port 8000\n" in str(error.value)
    assert str(error.value).endswith("to be changed: --nnodes 2 needs --dist-init-addr HOST:PORT, where node 0 is")


def test_words_of_the_environment_are_kept_translated_or_named():
    words = "CUDA_VISIBLE_DEVICES=4,5 SGLANG_ENABLE_SPEC_V2=1 VLLM_USE_V1=1 SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=0"
    command, left = answer(f"{words} {SGLANG}")
    assert command == f"CUDA_VISIBLE_DEVICES=4,5 {HERE}"
    assert left == [
        "left out: SGLANG_ENABLE_SPEC_V2=1: drafts overlap unless --disable-overlap is given",
        "left out: VLLM_USE_V1=1: it has no counterpart here",
        "left out: SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=0: a context is at most the model's, unless "
        "--allow-longer-context is given",
    ]


@pytest.mark.parametrize("model_type,line,said", [
    ("mamba", "{}", "model_type 'mamba' is not supported; docs/models.md has the "),
    ("speculators", "{}", "is a drafter; name its target as the model: --model meta/target --draft "),
    (None, "RedHatAI/Qwen3-32B-speculator.eagle3",
     "--model RedHatAI/Qwen3-32B-speculator.eagle3 is a drafter; name its target as the model: --model qwen/qwen3-32b "
     "--draft eagle3:RedHatAI/Qwen3-32B-speculator.eagle3"),
    (None, "a/Unheard-of-speculator.eagle3", "--model TARGET --draft a/Unheard-of-speculator.eagle3"),
])  # fmt: skip
def test_what_a_start_would_refuse_is_said_at_once(tmp_path, model_type, line, said):
    config = {"speculators_config": {"verifier": {"name_or_path": "meta/target"}}}
    config = config if model_type == "speculators" else tiny_config() | {"model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError) as error:
        parse(shlex.split(f"sglang serve --model-path {line.format(tmp_path)}"))
    assert said in str(error.value).partition("\nto be changed: ")[2]


QWEN35 = "Qwen/Qwen3.5-35B-A3B-FP8"
PULL_REQUESTS = {
    "22128, MTP": (
        f"python3 -m sglang.launch_server --model-path {QWEN35} --tp 2 --speculative-algo NEXTN "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 "
        "--enable-piecewise-cuda-graph --mamba-scheduler-strategy extra_buffer --reasoning-parser qwen3",
        f"--model {QWEN35} --tp-size 2 --reasoning-parser qwen3 --draft mtp --num-draft-tokens 3",
    ),
    "22128, EAGLE-3": (
        "python3 -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B --tp 2 --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path AngelSlim/Qwen3-a3B_eagle3 --speculative-num-steps 3 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --enforce-piecewise-cuda-graph",
        "--model Qwen/Qwen3-30B-A3B --tp-size 2 --draft eagle3:AngelSlim/Qwen3-a3B_eagle3 --num-draft-tokens 3",
    ),
    "22128, a draft model": (
        "python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B-FP8 --tp 2 --speculative-algorithm STANDALONE "
        "--speculative-draft-model-path Qwen/Qwen3-0.6B --speculative-num-steps 4 --speculative-eagle-topk 1",
        "--model Qwen/Qwen3-8B-FP8 --tp-size 2 --draft standalone:Qwen/Qwen3-0.6B --num-draft-tokens 4",
    ),
    "22128, n-grams": (
        "python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B --speculative-algorithm NGRAM "
        "--speculative-num-draft-tokens 16 --enable-piecewise-cuda-graph",
        "--model Qwen/Qwen3-8B --draft ngram --num-draft-tokens 15",
    ),
    "22128, a user's": (
        "python -m sglang.launch_server --model-path Qwen/Qwen3.5-27B-FP8 --served-model-name qwen --host 0.0.0.0 "
        "--port 8000 --tp 2 --mem-fraction 0.85 --context-length 65536 --kv-cache-dtype fp8_e4m3 --sleep-on-idle "
        "--speculative-algo NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 4 --mamba-scheduler-strategy extra_buffer --enable-multimodal "
        "--reasoning-parser qwen3 --tool-call-parser qwen3_coder --trust-remote-code --max-running-requests 8 "
        """--model-loader-extra-config '{"enable_multithread_load": true, "num_threads": 8}' """,
        "--model Qwen/Qwen3.5-27B-FP8 --served-model-name qwen --host 0.0.0.0 --port 8000 --tp-size 2 "
        "--mem-fraction-static 0.85 --context-length 65536 --kv-cache-dtype fp8_e4m3 --reasoning-parser qwen3 "
        "--tool-call-parser qwen3_coder --max-running-requests 8 --load-threads 8 --draft mtp --num-draft-tokens 3",
    ),
    "naive EAGLE, a tree of EAGLE's": (
        "python -m sglang.launch_server --model-path meta-llama/Llama-2-70b-chat-hf --tp 2 "
        "--speculative-algorithm EAGLE --speculative-draft-model-path lmsys/sglang-EAGLE-llama2-chat-70B "
        "--speculative-num-steps 2 --speculative-eagle-topk 4 --speculative-num-draft-tokens 4",
        "--model meta-llama/Llama-2-70b-chat-hf --tp-size 2 --draft eagle:lmsys/sglang-EAGLE-llama2-chat-70B --topk 4 "
        "--num-steps 2 --num-draft-tokens 3",
    ),
    "naive EAGLE, a smaller tree": (
        "python -m sglang.launch_server --model-path meta-llama/Llama-2-70b-chat-hf --tp 2 "
        "--speculative-algorithm EAGLE --speculative-draft-model-path lmsys/sglang-EAGLE-llama2-chat-70B "
        "--speculative-num-steps 1 --speculative-eagle-topk 2 --speculative-num-draft-tokens 2",
        "--model meta-llama/Llama-2-70b-chat-hf --tp-size 2 --draft eagle:lmsys/sglang-EAGLE-llama2-chat-70B --topk 2 "
        "--num-steps 1 --num-draft-tokens 1",
    ),
    "naive EAGLE": (
        "python -m sglang.launch_server --model-path meta-llama/Llama-2-70b-chat-hf --tp 2 "
        "--speculative-algorithm NAIVE_EAGLE --speculative-draft-model-path lmsys/sglang-EAGLE-llama2-chat-70B "
        "--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2 --requests-all-greedy",
        "--model meta-llama/Llama-2-70b-chat-hf --tp-size 2 --draft eagle:lmsys/sglang-EAGLE-llama2-chat-70B "
        "--num-draft-tokens 1",
    ),
    "20547, DFlash": (
        "SGLANG_ENABLE_SPEC_V2=1 SGLANG_ENABLE_DFLASH_SPEC_V2=1 SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1 python -m "
        "sglang.launch_server --model-path Qwen/Qwen3-30B-A3B-FP8 --speculative-algorithm DFLASH "
        "--speculative-draft-model-path a/b --speculative-num-draft-tokens 16 --attention-backend trtllm_mha "
        "--speculative-draft-attention-backend fa4 --page-size 64 --chunked-prefill-size -1 "
        "--max-prefill-tokens 16384 --cuda-graph-max-bs 128 --cuda-graph-bs 1 2 4 8 16 32 "
        "--piecewise-cuda-graph-max-tokens 8000 --stream-interval 1 --enable-metrics --nccl-port 9 --base-gpu-id 1",
        "--model Qwen/Qwen3-30B-A3B-FP8 --page-size 64 --batch-sizes 1,2,4,8,16,32 --draft dflash:a/b "
        "--num-draft-tokens 15",
    ),
    "18906, one stream": (
        "SGLANG_ENABLE_SPEC_V2=0 python -m sglang.launch_server --model-path Qwen/Qwen3.5-397B-A17B --tp-size 8 "
        "--mem-fraction-static 0.8 --context-length 262144 --reasoning-parser qwen3 --speculative-algo NEXTN "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
        "--model Qwen/Qwen3.5-397B-A17B --tp-size 8 --mem-fraction-static 0.8 --context-length 262144 "
        "--reasoning-parser qwen3 --disable-overlap --draft mtp --num-draft-tokens 3",
    ),
    "15591, Qwen3-Next": (
        "CUDA_VISIBLE_DEVICES=4,5,6,7 SGLANG_ENABLE_JIT_DEEPGEMM=0 SGLANG_ENABLE_SPEC_V2=1 python3 -m "
        "sglang.launch_server --model Qwen/Qwen3-Next-80B-A3B-Instruct --tp 4 --speculative-num-steps 3 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --speculative-algorithm NEXTN",
        "CUDA_VISIBLE_DEVICES=4,5,6,7 --model Qwen/Qwen3-Next-80B-A3B-Instruct --tp-size 4 --draft mtp "
        "--num-draft-tokens 3",
    ),
}


@pytest.mark.parametrize("name", PULL_REQUESTS)
def test_command_lines_of_sglangs_pull_requests_on_speculation(name):
    line, here = PULL_REQUESTS[name]
    command, left = answer(line)
    assert command == here
    told = " ".join(left)
    given = [word for word in shlex.split(line) if word.startswith(("--", "SGLANG"))]
    silent = [word for word in given if word.startswith(("--enable", "--enforce", "SGLANG")) and word not in told]
    assert not silent or silent == ["SGLANG_ENABLE_SPEC_V2=0"], silent


@pytest.mark.parametrize("flag", sorted({*ELSEWHERE, *SEVERAL_GPUS, *NEEDLESS, *UNSUPPORTED}))
def test_whatever_a_flag_of_theirs_has_for_a_value(flag):
    """Check, with `answer`, that printed commands parse, and drop nothing silently but what is so here anyway."""
    for value in ("", "=", " -1", " auto", " 4k", " none a/c", " 1", "=true"):
        command, left = answer(f"{VLLM} --{flag.replace('_', '-')}{value}")
        here = ELSEWHERE.get(flag, "nothing").replace("_", "-")
        assert left or f"--{here}" in command or value in (" 1", "=true"), value
