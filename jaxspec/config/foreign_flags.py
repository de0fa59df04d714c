"""vLLM's and SGLang's names for options that have other names here, so that an error can give ours.

Names are spelt with underscores and without leading dashes. Nothing here is accepted as an option: `meant` explains one
in an error message, and `server.cli.translate` rewrites a whole command line.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence

ELSEWHERE = {
    **dict.fromkeys(("max_model_len", "context_len"), "context_length"),
    **dict.fromkeys(("speculative_algorithm", "speculative_config", "speculative_model"), "draft"),
    **dict.fromkeys(("speculative_draft_model_path", "speculative_draft_model"), "draft"),
    **dict.fromkeys(("speculative_num_draft_tokens", "num_speculative_tokens"), "num_draft_tokens"),
    **dict.fromkeys(("disable_radix_cache", "no_enable_prefix_caching"), "disable_prefix_cache"),
    **dict.fromkeys(("mamba_ssm_dtype", "mamba_ssm_cache_dtype"), "state_dtype"),
    **dict.fromkeys(("disable_overlap_schedule", "no_async_scheduling"), "disable_overlap"),
    **dict.fromkeys(("cuda_graph_bs", "cudagraph_capture_sizes", "cuda_graph_sizes"), "batch_sizes"),
    "piecewise_cuda_graph_tokens": "prefill_sizes",
    **dict.fromkeys(("nccl_init_addr", "master_addr"), "dist_init_addr"),  # the server's, which isn't an engine's
    "block_size": "page_size",
    **dict.fromkeys(("hicache_size", "kv_offloading_size"), "host_kv_gb"),
    "allowed_local_media_path": "allowed_media_path",  # the server's, which isn't an engine's
    **dict.fromkeys(("model_loader_extra_config", "weight_loader_prefetch_num_threads"), "load_threads"),
    "safetensors_prefetch_num_threads": "load_threads",
    **dict.fromkeys(("limit_mm_per_prompt", "limit_mm_data_per_request"), "limit_images_per_prompt"),
    "enable_deterministic_inference": "deterministic",
    "enable_sleep_mode": "enable_rollout_routes",  # the server's, which isn't an engine's
    "admin_api_key": "api_key",  # the server's, which isn't an engine's
    "generation_config": "sampling_defaults",  # the server's, which isn't an engine's
    "gpu_memory_utilization": "mem_fraction_static",
    "max_num_batched_tokens": "chunked_prefill_size",
    "max_num_seqs": "max_running_requests",
    "model_path": "model",
    "random_seed": "seed",
    "lora_paths": "lora_modules",
    "max_loras_per_batch": "max_loras",
    "max_loaded_loras": "max_cpu_loras",
    **dict.fromkeys(("speculative_draft_model_quantization", "speculative_model_quantization"), "draft_quantization"),
    **dict.fromkeys(("tp", "tensor_parallel_size"), "tp_size"),
    **dict.fromkeys(("ep", "expert_parallel_size", "enable_expert_parallel"), "ep_size"),
    **dict.fromkeys(("dp", "data_parallel_size"), "dp_size"),
    "enable_dp_attention": "dp_attention",
    **dict.fromkeys(
        ("scheduling_policy", "enable_priority_scheduling", "schedule_low_priority_values_first"), "schedule_policy"
    ),
    "speculative_eagle_topk": "topk",
    "speculative_num_steps": "num_steps",
    "speculative_token_map": "draft_token_map",
}
SEVERAL_GPUS = frozenset(
    {
        *("pp", "pp_size", "pipeline_parallel_size", "speculative_draft_tensor_parallel_size"),
    }
)

# Options of no use here, and why. Those in SWITCHES, like them, take no value.
NEEDLESS = {
    **dict.fromkeys(("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling"), "it is always on"),
    **dict.fromkeys(("enable_metrics", "enable_cache_report"), "it is always on"),
    "enable_mixed_chunk": "each step runs prompts and rounds, in a program of each",
    "enable_nan_detection": "it is always on: a request whose logits are NaN or infinite ends with an error",
    **dict.fromkeys(("enforce_eager", "disable_cuda_graph"),
                    "every step is one compiled program; --disable-jit runs its operations one by one, for debugging"),
    **dict.fromkeys(("compilation_config", "disable_cuda_graph_padding",
                     "enable_piecewise_cuda_graph", "disable_piecewise_cuda_graph", "enforce_piecewise_cuda_graph",
                     "piecewise_cuda_graph_compiler"),
                    "every step is one compiled program"),
    **dict.fromkeys(("cuda_graph_max_bs", "max_cudagraph_capture_size"),
                    "every step is one compiled program, up to --max-running-requests; --batch-sizes lists the sizes"),
    "piecewise_cuda_graph_max_tokens":
        "every step is one compiled program, up to --chunked-prefill-size; --prefill-sizes lists the sizes",
    **dict.fromkeys(("attention_backend", "sampling_backend", "speculative_attention_mode", "device",
                     "prefill_attention_backend", "decode_attention_backend", "mm_attention_backend",
                     "speculative_draft_attention_backend", "moe_runner_backend", "fp8_gemm_backend"),
                    "it is chosen from model and machine"),
    **dict.fromkeys(("max_parallel_loading_workers", "safetensors_load_strategy", "weight_loader_prefetch_checkpoints",
                     "weight_loader_disable_mmap", "safetensors_prefetch_block_size"),
                    "--load-threads threads read each device's part, and the host holds 4 GiB of weights at a time"),
    "weight_loader_drop_cache_after_load": "files aren't mapped, and the kernel drops what it caches of them",
    **dict.fromkeys(("use_tqdm_on_load", "no_use_tqdm_on_load"),
                    "loading has a bar on a terminal, and lines in a log"),
    **dict.fromkeys(("hicache_write_policy", "hicache_io_backend", "hicache_mem_layout"),
                    "pages are copied once they are full, each as one block, beside the rounds"),
    "hicache_storage_prefetch_policy": "a prompt waits for the disk where that is faster than computing",
    "sleep_on_idle": "the engine waits for requests without a loop",
    **dict.fromkeys(("mamba_scheduler_strategy", "mamba_track_interval", "mamba_radix_cache_strategy"),
                    "drafts, overlap and prefix cache of hybrids go together; --state-snapshot-interval sets how often "
                    "states are kept"),
    "enable_multimodal": "pictures are read wherever the model has a vision tower that is supported",
    "requests_all_greedy": "a batch of greedy requests alone runs in programs that sample nothing",
    "nccl_port": "GPUs of one host need no port; for several hosts --dist-init-addr names one",
    **dict.fromkeys(("base_gpu_id", "gpu_id_step"), "CUDA_VISIBLE_DEVICES in the environment chooses the GPUs"),
    **dict.fromkeys(("disable_log_requests", "no_enable_log_requests", "disable_log_stats", "log_level_http",
                     "uvicorn_log_level"),
                    "requests are logged with --access-log alone"),
    **dict.fromkeys(("trust_remote_code", "no_trust_remote_code"), "a checkpoint's code is never run"),
    "distributed_executor_backend": "one process serves on the GPUs of each host",
    **dict.fromkeys(("torch_compile_max_bs", "enable_torch_compile"), "every step is one compiled program"),
    "schedule_conservativeness": "a request is admitted once its prompt and first rounds have pages",
    "abort_on_priority_when_disabled": "it is always on: a priority is refused unless --schedule-policy has them",
    **dict.fromkeys(("max_prefill_tokens", "max_num_partial_prefills", "long_prefill_token_threshold"),
                    "--chunked-prefill-size and --max-itl-ms limit prompts"),
    **dict.fromkeys(("guided_decoding_backend", "grammar_backend", "structured_outputs_config"),
                    "llguidance compiles grammars"),
    "max_logprobs": "a request may ask for 20",
    "return_tokens_as_token_ids": "a request may ask for it by the field of that name",
    "stream_interval": "a stream has what each round yields; --num-continuous-decode-steps makes that more",
    "skip_server_warmup": "the server sends itself no request; --skip-warmup compiles programs on first use",
    **dict.fromkeys(("ngram_min", "ngram_max", "speculative_ngram_min_match_window_size",
                     "speculative_ngram_max_match_window_size", "prompt_lookup_min", "prompt_lookup_max"),
                    "the drafter takes it: --draft 'ngram?min_match=2&max_match=5'"),
    "speculative_dflash_draft_window_size": "the drafter takes it: --draft 'dflash:D?window=2048'",
    **dict.fromkeys(("load_balance_method", "data_parallel_backend", "data_parallel_size_local"),
                    "--dp-size engines run on this host; a request goes to the one with its prefix, or the least busy"),
    "enable_auto_tool_choice": "it is always on where tools are supported",
    **dict.fromkeys(("h", "help", "version"), "give it alone"),
    **dict.fromkeys(("task", "runner", "convert", "is_embedding"),
                    "a checkpoint says if it is for embeddings or scores; --pooling says it for others"),
    "speculative_adaptive": "it is on unless --draft-policy is fixed",
    **dict.fromkeys(("lora_backend", "max_lora_chunk_size", "lora_use_virtual_experts"), "it is chosen by the machine"),
    "lora_eviction_policy": "the least recently used adapter gives way",
    "lora_dtype": "adapters have the model's dtype",
    "fully_sharded_loras": "an adapter is divided as the weights are that it changes",
    "enable_lora_overlap_loading": "an adapter comes to the device with the first request that has it",
    "lora_extra_vocab_size": "adapters with new tokens are not supported",
}  # fmt: skip
UNSUPPORTED = {
    **dict.fromkeys(("torchao_config", "quantization_param_path"),
                    "weights are quantised by --quantization fp8, or as their checkpoint has them"),
    "default_mm_loras": "a request names its adapter",
    **dict.fromkeys(("cpu_offload_gb", "swap_space"),
                    "weights stay on the device; --host-kv-gb keeps KV in the host's memory"),
    "enable_hierarchical_cache": "--host-kv-gb GIB gives the cache a size in the host's memory",
    "hicache_ratio": "--host-kv-gb takes GiB; the memory plan in the log says what the KV cache takes",
    **dict.fromkeys(("hicache_storage_backend", "hicache_storage_backend_extra_config", "enable_lmcache"),
                    "KV is kept on the device, in this host's memory (--host-kv-gb) and on its disk (--disk-kv-gb)"),
    **dict.fromkeys(("tokenizer", "tokenizer_path", "tokenizer_mode"),
                    "the tokenizer is the one in the model's folder"),
    **dict.fromkeys(("chat_template", "chat_template_content_format"),
                    "the chat template is the one in the model's folder"),
    "mm_processor_kwargs": "the processor is as the checkpoint's preprocessor_config.json says; change that",
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile"), "TLS is not supported; put a proxy before the server"),
    **dict.fromkeys(("master_port", "data_parallel_address", "data_parallel_rpc_port"),
                    "with --nnodes, --dist-init-addr HOST:PORT says where node 0 is"),
    **dict.fromkeys(("priority_scheduling_preemption_threshold", "disable_priority_preemption"),
                    "with --schedule-policy priority, requests preempt any whose priority comes after theirs"),
    "disaggregation_mode": "prefill and decoding run in one process",
    "kv_transfer_config": "prefill and decoding run in one process; of connectors, native offloading has --host-kv-gb",
    "kv_offloading_backend": "--host-kv-gb keeps pages in this process; other backends are not supported",
    **dict.fromkeys(("hf_overrides", "rope_scaling", "json_model_override_args"),
                    "the model's config is taken as it is; change its config.json"),
    "no_enable_chunked_prefill": "long prompts are always prefilled in chunks",
    "download_dir": "set HF_HOME in the environment",
    "override_generation_config": "change the model's generation_config.json, or set --sampling-defaults openai",
    "root_path": "put a proxy before the server",
}  # fmt: skip
SWITCHES = frozenset(
    {
        *("disable_radix_cache", "no_enable_prefix_caching", "disable_overlap_schedule", "no_async_scheduling"),
        *("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling", "enable_metrics"),
        *("enable_cache_report", "enable_mixed_chunk", "enforce_eager", "disable_cuda_graph", "disable_log_requests"),
        *("no_enable_log_requests", "disable_log_stats", "trust_remote_code", "no_trust_remote_code"),
        *("enable_auto_tool_choice", "enable_expert_parallel", "is_embedding", "enable_multimodal"),
        *("enable_deterministic_inference", "enable_hierarchical_cache", "speculative_adaptive", "enable_dp_attention"),
        *("enable_torch_compile", "return_tokens_as_token_ids", "skip_server_warmup", "no_enable_chunked_prefill"),
        *("enable_nan_detection", "enable_sleep_mode", "h", "help", "version", "sleep_on_idle", "requests_all_greedy"),
        *("enable_piecewise_cuda_graph", "disable_piecewise_cuda_graph", "enforce_piecewise_cuda_graph"),
        *("enable_priority_scheduling", "schedule_low_priority_values_first", "abort_on_priority_when_disabled"),
        *("disable_cuda_graph_padding", "disable_priority_preemption", "fully_sharded_loras"),
        *("enable_lora_overlap_loading", "lora_use_virtual_experts", "weight_loader_prefetch_checkpoints"),
        *("weight_loader_disable_mmap", "weight_loader_drop_cache_after_load"),
        *("use_tqdm_on_load", "no_use_tqdm_on_load"),
    }
)

# Methods of --draft, as `drafters.registry.DRAFTERS` has them.
DRAFT_METHODS = (
    *("ngram", "suffix", "mtp", "standalone", "eagle", "eagle3", "dflash", "dflash2", "dspark", "domino", "lilicorr"),
    "assistant",
)
# --draft by what the others call the method. SGLang's EAGLE without a drafter's path means the model's own MTP module.
METHODS = {
    **{method: method for method in DRAFT_METHODS},
    **dict.fromkeys(("gemma4_mtp", "frozen_kv_mtp"), "assistant"),
    "naive_eagle": "eagle",  # one draft a round
    **dict.fromkeys(("nextn", "deepseek_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "glm4_moe_mtp", "mimo_mtp"), "mtp"),
    **dict.fromkeys(("ernie_mtp", "exaone_moe_mtp", "hy_v3_mtp"), "mtp"),
    **dict.fromkeys(("draft_model", "draft"), "standalone"),
    **dict.fromkeys(("[ngram]", "lookahead", "prompt_lookup"), "ngram"),
}

THEIRS = frozenset({*ELSEWHERE, *SEVERAL_GPUS, *NEEDLESS, *UNSUPPORTED, *SWITCHES})
# Words of the environment that are the others' own, and our flag for a value, or a sentence.
ENVIRONMENT: dict[str, dict[str, str]] = {
    "SGLANG_ENABLE_SPEC_V2": {"0": "--disable-overlap", "": "drafts overlap unless --disable-overlap is given"},
    "VLLM_SERVER_DEV_MODE": {
        "1": "--enable-rollout-routes",
        "": "/sleep, /pause and the like need an API key, or --enable-rollout-routes",
    },
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": {
        "1": "--lora-root=/",
        "": "clients load adapters from the folder of --lora-root alone",
    },
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": {
        "1": "--allow-longer-context",
        "": "a context is at most the model's, unless --allow-longer-context is given",
    },
}
ENVIRONMENT["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = ENVIRONMENT["VLLM_ALLOW_LONG_MAX_MODEL_LEN"]
ENVIRONMENT["SGLANG_ENABLE_DFLASH_SPEC_V2"] = ENVIRONMENT["SGLANG_ENABLE_SPEC_V2"]
ENVIRONMENT["SGLANG_ENABLE_OVERLAP_PLAN_STREAM"] = {"": ENVIRONMENT["SGLANG_ENABLE_SPEC_V2"][""]}


def unabbreviated(name: str, known: Iterable[str] = ()) -> str:
    """The flag that a name begins, as argparse lets users cut flags short; the name itself if none or several do that
    aren't one flag here."""
    every = THEIRS.union(known)
    begun = [each for each in every if each.startswith(name)] if name not in every and len(name) > 1 else ()
    return min(begun, key=len) if len({ELSEWHERE.get(each, each) for each in begun}) == 1 else name


def meant(name: str, known: Sequence[str], spell: Callable[[str], str] = str) -> str:
    """Hint at what an option outside `known` may have meant, to be added to an error; "" without a guess."""
    name = name if name in known else unabbreviated(name)
    if name in SEVERAL_GPUS:
        return "; of several GPUs, --tp-size, --ep-size and --dp-size are supported"
    for table in (UNSUPPORTED, NEEDLESS):
        if name in table:
            return f"; {table[name]}"
    if ELSEWHERE.get(name) in known:
        return f"; here it is {spell(ELSEWHERE[name])}"
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {spell(near[0])}?" if near and not _opposite(name, near[0]) else ""


def _opposite(name: str, other: str) -> bool:
    """Whether one turns on what the other turns off."""
    negations = lambda text: sum(word in ("disable", "no", "skip") for word in text.split("_"))  # noqa: E731
    return (negations(name) - negations(other)) % 2 == 1
