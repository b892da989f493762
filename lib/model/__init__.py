"""The networks: packed passes, shards and where they live, the optimizer."""

from lib.rooms import exports

__all__, __getattr__ = exports(
    __name__,
    batching="balance_stats iter_micro_batches iter_mini_batches make_batch",
    critic_config="CriticConfig CriticOptimConfig",
    forward="compute_log_probs compute_values forward_critic forward_policy with_old_log_probs",
    frozen="FrozenModel",
    fsdp="FSDPConfig begin_micro_batch held_bytes load_critic load_policy offload onload reshard",
    lora="LoRAConfig",
    networks="CausalPolicy Critic ModelConfig",
    optim="OptimConfig build_optimizer moments_to_come optimizer_step set_lr_",
    speed="flops_forward peak_flops perf_metrics",
)
