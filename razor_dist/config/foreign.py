"""Settings under the names that other servers give them."""

# Settings that users of vLLM, SGLang and llama-server know, and ours for the same end.
FOREIGN_SETTINGS = {
    **dict.fromkeys(("tensor_parallel_size", "tp", "tp_size"), "world_size"),
    **dict.fromkeys(("pipeline_parallel_size", "pp_size"), "world_size"),
    **dict.fromkeys(("data_parallel_size", "dp_size"), "world_size"),
    **dict.fromkeys(("context_parallel_size", "nproc_per_node"), "world_size"),
    "max_num_batched_tokens": "chunked_prefill_size",
    **dict.fromkeys(("max_running_requests", "parallel"), "max_num_seqs"),
    **dict.fromkeys(("context_length", "ctx_size", "max_seq_len"), "max_model_len"),
    **dict.fromkeys(("gpu_memory_utilization", "mem_fraction_static"), "kv_tokens"),
    **dict.fromkeys(("max_total_tokens", "num_gpu_blocks_override"), "kv_tokens"),
    **dict.fromkeys(("kv_cache_dtype", "cache_type_k"), "kv_dtype"),
    "block_size": "page_size",
    "otlp_traces_endpoint": "otlp_endpoint",
    **dict.fromkeys(("enforce_eager", "disable_cuda_graph"), "cuda_graphs"),
    **dict.fromkeys(("hf_overrides", "rope_parameters"), "rope_scaling"),
    "model_path": "model",
    "random_seed": "seed",
    "attention_backend": "attention",
}
