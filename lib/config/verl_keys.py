"""verl's configuration keys and what each is here: for the hint when one is pasted, and for docs/from_verl.md.

Each key maps to (option, note). No option: the note says why none is needed, or that it comes with a later release.
The lists hold what users of verl's FSDP + vLLM path put into their commands; `python -m lib.config.verl_keys` prints
them.
"""

import re
from collections.abc import Collection

LATER = "comes with a later release"
NO_RAY = "not needed: there is no Ray, torchrun starts the ranks"
ALWAYS = "not needed: always on"
PACKED = "not needed: rows are always packed, micro-batches are always made by token budget"
ONE_PASS = "not needed: the same token budget serves every pass"
REFERENCE = "not needed: the reference is loaded only if used, and has the policy's precision and sharding"
SLEEP = "training only; default: only where an update needs the memory (verl: always)"
ROLLOUT_LEN = "not needed: the engine's length is --data.max-prompt-len + --rollout.max-response-len"

SWITCH = "above 0 for True; for False leave it out: the default is 0"
NO_CRITIC = (
    "leave it out, or start train_ppo.py or a recipe of it: it is an option of PPO's critic, which this script has not"
)

ROLLOUT = "actor_rollout_ref.rollout."
ACTOR = "actor_rollout_ref.actor."
MODEL = "actor_rollout_ref.model."
REF = "actor_rollout_ref.ref."


def _under(prefix: str, rows: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    return {prefix + key: row for key, row in rows.items()}


DATA = _under(
    "data.",
    {
        "train_files": ("--data.train-files", "several files after one option, separated by spaces, without brackets"),
        "val_files": ("--data.val-files", "several files after one option, separated by spaces, without brackets"),
        "train_batch_size": ("--prompts-per-step", "the same unit: prompts per step, over all ranks"),
        "gen_batch_size": ("", "not needed: a round asks for as many prompts as are missing"),
        "val_batch_size": ("", "not needed: the engine schedules the whole validation set"),
        "max_prompt_length": ("--data.max-prompt-len", "tokens"),
        "max_response_length": ("--rollout.max-response-len", "tokens"),
        "filter_overlong_prompts": ("--data.filter-overlong-prompts", ""),
        "filter_overlong_prompts_workers": ("", "not needed: prompts are tokenised in one fast pass"),
        "truncation": ("--data.truncation", "error, left, right or middle; all four are honoured"),
        "prompt_key": ("--data.prompt-key", ""),
        "reward_fn_key": ("", "not needed: the column is data_source"),
        "image_key": ("", "images are not supported"),
        "video_key": ("", "videos are not supported"),
        "shuffle": ("--data.shuffle", "the order follows --seed"),
        "seed": ("--seed", "one seed for the data order and the rollouts"),
        "validation_shuffle": ("", "not needed: the order does not change validation"),
        "train_max_samples": ("--data.train-max-samples", "None is all (verl: -1)"),
        "val_max_samples": ("--data.val-max-samples", "None is all (verl: -1)"),
        "apply_chat_template_kwargs": ("--data.chat-template-kwargs", "as JSON: '{\"enable_thinking\": false}'"),
        "custom_cls.path": ("--data.dataset-path", ""),
        "custom_cls.name": ("--data.dataset-name", ""),
        "return_raw_chat": ("", "not needed: the message list is always kept"),
        "return_full_prompt": ("", "not needed: samples are written with their prompts"),
        "need_tools_kwargs": ("", "tools come with a later release"),
        "dataloader_num_workers": ("", "not needed: prompts are tokenised before training"),
        "use_shm": ("", "not needed: rank 0 reads the model and broadcasts it"),
        "trust_remote_code": ("", "refused: model folders with their own code are not run"),
    },
)

ALGORITHM = _under(
    "algorithm.",
    {
        "adv_estimator": (
            "--advantage",
            "verl's names; grpo_vectorized is grpo, rloo_vectorized is rloo, tir_optimal_token_baseline is "
            "optimal_token_baseline; dr_grpo is grpo without the standard deviation",
        ),
        "gdpo_reward_keys": ("--advantage.reward-keys", "with --advantage gdpo; without brackets"),
        "gdpo_reward_weights": ("--advantage.reward-weights", "with --advantage gdpo; without brackets"),
        "norm_adv_by_std_in_grpo": ("--advantage.norm-by-std", ""),
        "gamma": ("--advantage.gamma", "with --advantage reinforce_plus_plus, or in train_ppo.py"),
        "lam": ("--advantage.lam", "train_ppo.py"),
        "use_kl_in_reward": ("--kl-reward.coef", SWITCH),
        "kl_penalty": ("--kl-reward.type", "verl's names, k1+ and k3+ among them; default k1, as verl's kl"),
        "kl_ctrl.type": ("--kl-reward.target", "a number for adaptive; for fixed leave it out"),
        "kl_ctrl.kl_coef": ("--kl-reward.coef", "0 switches the KL in the reward off"),
        "kl_ctrl.horizon": ("--kl-reward.horizon", "responses"),
        "kl_ctrl.target_kl": ("--kl-reward.target", "nats per token; None keeps the coefficient fixed"),
        "filter_groups.enable": ("--filter-groups.enable", ""),
        "filter_groups.metric": ("--filter-groups.metric", "score, or a number that the reward returns, such as acc"),
        "filter_groups.max_num_gen_batches": (
            "--filter-groups.max-rounds",
            "at the limit the step trains on the groups that there are",
        ),
        "rollout_correction": ("--correction", "verl's names of the presets; default auto: token truncation at 2.0"),
        "rollout_correction.rollout_is": ("--correction.is-level", "none (verl: null), token or sequence"),
        "rollout_correction.rollout_is_threshold": (
            "--correction.is-threshold",
            "IcePop's 0.5_5.0 is --correction.icepop-low 0.5 --correction.is-threshold 5.0",
        ),
        "rollout_correction.rollout_is_batch_normalize": ("--correction.batch-normalize", ""),
        "rollout_correction.rollout_rs": (
            "--correction.reject",
            'with its bounds, as JSON: \'{"seq_mean_k1": [0.5, 2.0], "token_k3": 0.01}\'',
        ),
        "rollout_correction.rollout_rs_threshold": (
            "--correction.reject",
            "[low, high] of a k1 bound old / rollout probability (verl's 0.5_4.0 bounds the inverse: [0.25, 2.0])",
        ),
        "rollout_correction.bypass_mode": ("--correction.bypass", "with --correction none: auto has weights"),
        "rollout_correction.loss_type": ("--correction.loss-type", "ppo_clip or reinforce"),
        "rollout_correction.debug_rollout_actor_probs": ("", ALWAYS),
        "use_pf_ppo": ("", "PF-PPO is not offered"),
    },
)

UPDATE = _under(
    ACTOR,
    {
        "ppo_mini_batch_size": (
            "--mini-batch-size",
            "another unit: verl counts prompts, here it is responses over all ranks: verl's number x --rollout.n",
        ),
        "ppo_micro_batch_size": ("--max-tokens-per-gpu", "another unit: tokens of a micro-batch, not responses"),
        "ppo_micro_batch_size_per_gpu": (
            "--max-tokens-per-gpu",
            "another unit: tokens of a micro-batch, not responses",
        ),
        "ppo_max_token_len_per_gpu": ("--max-tokens-per-gpu", "tokens of a micro-batch"),
        "use_dynamic_bsz": ("", PACKED),
        "ppo_epochs": ("--update-epochs", ""),
        "shuffle": ("", "not needed: membership of mini-batches follows --seed"),
        "data_loader_seed": ("--seed", ""),
        "strategy": ("", "not needed: always FSDP2"),
        "clip_ratio": ("--loss.clip-low", "and --loss.clip-high: here each bound is set by itself"),
        "clip_ratio_low": ("--loss.clip-low", "each loss has a default of its own (verl: 0.2 for all)"),
        "clip_ratio_high": ("--loss.clip-high", "each loss has a default of its own (verl: 0.2 for all)"),
        "clip_ratio_c": ("--loss.clip-dual", "--loss dppo_tv and dppo_kl have --loss.max-ratio instead"),
        "policy_loss.loss_mode": ("--loss", "the same names, without bypass_mode"),
        "policy_loss.clip_cov_ratio": ("--loss.clip-cov-ratio", "with --loss clip_cov"),
        "policy_loss.clip_cov_lb": ("--loss.clip-cov-lb", "with --loss clip_cov"),
        "policy_loss.clip_cov_ub": ("--loss.clip-cov-ub", "with --loss clip_cov"),
        "policy_loss.kl_cov_ratio": ("--loss.kl-cov-ratio", "with --loss kl_cov"),
        "policy_loss.ppo_kl_coef": ("--loss.ppo-kl-coef", "with --loss kl_cov"),
        "policy_loss.dro_beta": ("--loss.dro-beta", "with --loss dro"),
        "tau_pos": ("--loss.tau-pos", "with --loss sapo"),
        "tau_neg": ("--loss.tau-neg", "with --loss sapo"),
        "loss_agg_mode": (
            "--loss-agg-mode",
            "the same modes; default: the loss's own (gspo, sapo, geo_mean: seq-mean-token-mean; else token-mean)",
        ),
        "loss_scale_factor": ("--loss-scale-factor", "default: --rollout.max-response-len"),
        "tis_imp_ratio_cap": ("--correction.is-threshold", "of token weights, the default: 2.0"),
        "entropy_coeff": ("--entropy-coef", ""),
        "calculate_entropy": ("", ALWAYS),
        "use_kl_loss": ("--kl-loss-coef", SWITCH),
        "kl_loss_coef": ("--kl-loss-coef", "0 switches the KL loss off, and no reference is loaded"),
        "kl_loss_type": ("--kl-loss-type", "verl's names, the straight-through k1+ and k3+ among them"),
        "grad_clip": ("--optim.clip-grad", "the global norm; the same as optim.clip_grad"),
        "optim.lr": ("--optim.lr", ""),
        "optim.weight_decay": ("--optim.weight-decay", ""),
        "optim.eps": ("--optim.eps", ""),
        "optim.betas": ("--optim.betas", "two numbers separated by a space"),
        "optim.clip_grad": ("--optim.clip-grad", ""),
        "optim.lr_warmup_steps": ("--optim.warmup-steps", "steps; none is 0 (verl: -1)"),
        "optim.lr_warmup_steps_ratio": ("--optim.warmup-steps", "another unit: steps, not a share of the run"),
        "optim.lr_scheduler_type": ("--optim.schedule", "constant, cosine or linear"),
        "optim.warmup_style": ("--optim.schedule", "constant, cosine or linear"),
        "optim.min_lr_ratio": ("--optim.min-lr-ratio", ""),
        "optim.total_training_steps": ("--num-steps", "the schedule spans the run"),
        "optim.optimizer": ("", "not needed: AdamW"),
        "optim.optimizer_impl": ("", "not needed: torch's AdamW"),
        "optim.num_cycles": ("", "not needed: half a cosine"),
        "fsdp_config.param_offload": ("--fsdp.param-offload", ""),
        "fsdp_config.optimizer_offload": ("--fsdp.optimizer-offload", ""),
        "fsdp_config.offload_policy": ("--fsdp.param-offload", ""),
        "fsdp_config.reshard_after_forward": ("--fsdp.reshard-after-forward", ""),
        "fsdp_config.forward_prefetch": ("", "not needed: FSDP2 prefetches by itself"),
        "fsdp_config.fsdp_size": ("", "-1, all ranks, is what there is; smaller groups (HSDP) are not offered"),
        "fsdp_config.wrap_policy": ("", "not needed: one FSDP unit per decoder layer"),
        "fsdp_config.model_dtype": ("", "not needed: master weights are float32"),
        "fsdp_config.dtype": (
            "--model.dtype",
            "the type of compute; master weights, reductions and moments are float32",
        ),
        "ulysses_sequence_parallel_size": ("", "sequence parallelism " + LATER),
        "use_torch_compile": ("", "not needed: layers are compiled on a GPU, one by one"),
        "entropy_from_logits_with_chunking": ("", "not needed: log-probs and entropy are always made in chunks"),
        "entropy_checkpointing": ("", "not needed: log-probs and entropy are always made in chunks"),
        "freeze_vision_tower": ("", "images are not supported"),
        "checkpoint.save_contents": ("", "not needed: a checkpoint holds all that a resume needs"),
        "checkpoint.load_contents": ("", "not needed: a resume restores everything"),
    },
)

MODELS = _under(
    MODEL,
    {
        "path": ("--model.path", "a folder, or an id of the Hugging Face hub"),
        "tokenizer_path": ("", "not needed: the tokenizer is the model folder's"),
        "custom_chat_template": ("", "not offered: put chat_template.jinja into the model folder"),
        "enable_gradient_checkpointing": (
            "--model.gradient-checkpointing",
            "training only; default: only where memory asks for it (verl: True)",
        ),
        "enable_activation_offload": ("", "not offered; --model.gradient-checkpointing saves the same memory"),
        "use_remove_padding": ("", PACKED),
        "use_fused_kernels": ("", "not needed: log-probs are always made in chunks"),
        "use_liger": ("", "not needed: log-probs are always made in chunks"),
        "trust_remote_code": ("", "refused: model folders with their own code are not run"),
        "override_config": ("", "not offered: edit the model folder's config.json"),
        "external_lib": ("", "not needed: a recipe is Python and imports what it likes"),
        "use_shm": ("", "not needed: rank 0 reads the model and broadcasts it"),
        "lora_rank": ("", "LoRA " + LATER),
        "lora_alpha": ("", "LoRA " + LATER),
        "target_modules": ("", "LoRA " + LATER),
        "exclude_modules": ("", "LoRA " + LATER),
        "lora_adapter_path": ("", "LoRA " + LATER),
    },
)

REFERENCES = _under(
    REF,
    {
        "log_prob_micro_batch_size": ("", ONE_PASS + " (--max-tokens-per-gpu)"),
        "log_prob_micro_batch_size_per_gpu": ("", ONE_PASS + " (--max-tokens-per-gpu)"),
        "log_prob_max_token_len_per_gpu": ("", ONE_PASS + " (--max-tokens-per-gpu)"),
        "log_prob_use_dynamic_bsz": ("", PACKED),
        "fsdp_config.param_offload": ("", REFERENCE),
        "fsdp_config.reshard_after_forward": ("", REFERENCE),
        "strategy": ("", REFERENCE),
        "ulysses_sequence_parallel_size": ("", "sequence parallelism " + LATER),
    },
)

ROLLOUTS = _under(
    ROLLOUT,
    {
        "name": ("", "not needed: always vLLM, inside the training process"),
        "mode": ("", "not needed: always vLLM, inside the training process"),
        "n": ("--rollout.n", "responses per prompt; default 8 (verl: 1)"),
        "temperature": ("--rollout.temperature", ""),
        "top_p": ("--rollout.top-p", "below 1 is refused in training"),
        "top_k": ("--rollout.top-k", "all tokens is 0 (verl: -1); a limit is refused in training"),
        "do_sample": ("", "not needed: training samples; --eval.temperature 0 is greedy"),
        "prompt_length": ("--data.max-prompt-len", "tokens"),
        "response_length": ("--rollout.max-response-len", "tokens"),
        "max_model_len": ("", ROLLOUT_LEN),
        "ignore_eos": ("--rollout.ignore-eos", ""),
        "stop": ("--rollout.stop", "strings separated by spaces"),
        "dtype": ("--model.dtype", "the engine and the trainer compute in one type"),
        "gpu_memory_utilization": ("--rollout.gpu-memory-utilization", "share of the GPU's whole memory"),
        "tensor_model_parallel_size": ("--rollout.tensor-model-parallel-size", "default 1 (verl: 2)"),
        "data_parallel_size": ("", "not needed: ranks / tensor-parallel size"),
        "pipeline_model_parallel_size": ("", "pipeline parallelism is not offered"),
        "max_num_seqs": (
            "--rollout.max-num-seqs",
            "responses in flight on an engine; default: all of a step, 2048 at most (verl: 256)",
        ),
        "max_num_batched_tokens": (
            "--rollout.max-num-batched-tokens",
            "tokens of an engine step; default 16384 (verl: 8192)",
        ),
        "enforce_eager": ("--rollout.enforce-eager", ""),
        "enable_prefix_caching": ("--rollout.enable-prefix-caching", "the cache is emptied after every weight sync"),
        "enable_chunked_prefill": ("", "not needed: on with a GPU, off on a CPU"),
        "cudagraph_capture_sizes": ("--rollout.max-cudagraph-capture-size", "the largest size only"),
        "free_cache_engine": ("--rollout.sleep", SLEEP),
        "enable_sleep_mode": ("--rollout.sleep", SLEEP),
        "load_format": ("", "not needed: the engine starts empty and takes the trainer's weights"),
        "layered_summon": ("", "not needed: weights are synced tensor by tensor"),
        "calculate_log_probs": ("--rollout.log-probs", "training only"),
        "logprobs_mode": ("", "not needed: always the log-probs of the distribution that was sampled from"),
        "seed": ("--seed", "each prompt has its own seed, made from it"),
        "disable_log_stats": ("", ALWAYS),
        "skip_tokenizer_init": ("", "not needed: ids in, ids out"),
        "scheduling_policy": ("", "not needed: first come, first served"),
        "repetition_penalty": ("", "not offered: the trainer could not reproduce the log-probs"),
        "quantization": ("", "not offered: the engine holds the policy's own weights, bit for bit"),
        "engine_kwargs.vllm": ("", "not offered: the engine's settings are the options of the rollout section"),
        "engine_kwargs.vllm.disable_cascade_attn": ("", ALWAYS),
        "log_prob_micro_batch_size": ("", ONE_PASS + " (--max-tokens-per-gpu)"),
        "log_prob_micro_batch_size_per_gpu": ("", ONE_PASS + " (--max-tokens-per-gpu)"),
        "log_prob_max_token_len_per_gpu": ("", ONE_PASS + " (--max-tokens-per-gpu)"),
        "log_prob_use_dynamic_bsz": ("", PACKED),
        "val_kwargs.temperature": ("--eval.temperature", "0 is greedy"),
        "val_kwargs.top_p": ("--eval.top-p", ""),
        "val_kwargs.top_k": ("--eval.top-k", "all tokens is 0 (verl: -1)"),
        "val_kwargs.n": ("--eval.n", "responses per prompt"),
        "val_kwargs.do_sample": ("--eval.temperature", "above 0 for True; 0, which is greedy, for False"),
        "multi_turn.enable": ("", "tools come with a later release"),
        "multi_turn.tool_config_path": ("", "tools come with a later release"),
        "multi_turn.max_assistant_turns": ("", "tools come with a later release"),
        "agent.num_workers": ("", NO_RAY),
    },
)

REWARDS = {
    "custom_reward_function.path": ("--reward.path", ""),
    "custom_reward_function.name": ("--reward.name", ""),
    "custom_reward_function.reward_kwargs": ("--reward.kwargs", "as JSON: '{\"strict\": true}'"),
    "reward.custom_reward_function.path": ("--reward.path", ""),
    "reward.custom_reward_function.name": ("--reward.name", ""),
    "reward.custom_reward_function.reward_kwargs": ("--reward.kwargs", "as JSON: '{\"strict\": true}'"),
    "reward.num_workers": ("--reward.num-workers", "processes per rank"),
    "reward.reward_manager.name": ("", "not needed: responses are scored as they finish, in worker processes"),
    "reward.reward_kwargs.overlong_buffer_cfg.enable": ("--overlong.buffer-len", SWITCH),
    "reward.reward_kwargs.overlong_buffer_cfg.len": ("--overlong.buffer-len", "tokens"),
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": ("--overlong.factor", "default 1"),
    "reward.reward_kwargs.max_resp_len": ("", "not needed: always --rollout.max-response-len"),
    "reward.reward_model.enable": ("", "reward models come with a later release"),
    "reward.sandbox_fusion.url": ("", "not offered: reward workers are no sandbox; a reward file may ask a service"),
    "reward_model.enable": ("", "reward models come with a later release"),
    "reward_model.model.path": ("", "reward models come with a later release"),
    "reward_model.reward_manager": ("", "not needed: responses are scored as they finish, in worker processes"),
    "reward_model.launch_reward_fn_async": ("", ALWAYS),
    "reward_model.overlong_buffer.enable": ("--overlong.buffer-len", SWITCH),
    "reward_model.overlong_buffer.len": ("--overlong.buffer-len", "tokens"),
    "reward_model.overlong_buffer.penalty_factor": ("--overlong.factor", "default 1"),
}

TRAINER = {
    **_under(
        "trainer.",
        {
            "total_epochs": ("--total-epochs", ""),
            "total_training_steps": ("--num-steps", "steps"),
            "project_name": ("--tracking.wandb-project", "also switches wandb on"),
            "experiment_name": ("--tracking.name", ""),
            "logger": (
                "--tracking.wandb-project",
                "the project, for wandb; else leave it out: console, JSONL and TensorBoard are always on",
            ),
            "nnodes": ("", "not needed: torchrun --nnodes"),
            "n_gpus_per_node": ("", "not needed: torchrun --nproc_per_node"),
            "device": ("", "not needed: the GPU where there is one, else the CPU"),
            "test_freq": ("--eval.every", "steps; 0 is only after the last one (verl: -1 is never)"),
            "val_before_train": ("--eval.before-train", ""),
            "val_only": ("", "not needed: eval.py evaluates a model or a checkpoint"),
            "save_freq": ("--checkpoint.every", "steps, none is 0 (verl: -1); --checkpoint.every-minutes: by time"),
            "resume_mode": ("--checkpoint.resume", "auto; never for disable; a global_step_N for resume_path"),
            "resume_from_path": ("--checkpoint.resume", "the path of a global_step_N"),
            "max_actor_ckpt_to_keep": ("--checkpoint.keep", ""),
            "max_critic_ckpt_to_keep": ("--checkpoint.keep", ""),
            "del_local_ckpt_after_load": ("", "not needed: --checkpoint.keep bounds the disk"),
            "default_local_dir": ("--run-dir", "the whole run folder: metrics, samples, logs, checkpoints"),
            "default_hdfs_dir": ("", "not offered: the run folder is a local or mounted path"),
            "rollout_data_dir": (
                "",
                "not needed: rollouts are in RUN/rollouts/step_N.parquet (--tracking.rollouts-every)",
            ),
            "validation_data_dir": ("", "not needed: RUN/samples/step_N.jsonl holds every response of a validation"),
            "log_val_generations": ("", "not needed: RUN/samples/step_N.jsonl holds every response of a validation"),
            "balance_batch": ("", ALWAYS),
            "critic_warmup": ("--critic.warmup-steps", "train_ppo.py; steps"),
            "esi_redundant_time": ("", "--max-minutes ends a run before its machine goes away"),
            "use_v1": ("", NO_RAY),
            "use_legacy_worker_impl": ("", NO_RAY),
            "ray_wait_register_center_timeout": ("", NO_RAY),
        },
    ),
    "critic.enable": ("", "start train_ppo.py, which has a critic, or train_grpo.py, which has none"),
    "critic.optim.lr": ("--critic.optim.lr", "train_ppo.py; default 1e-5"),
    "critic.optim.weight_decay": ("--critic.optim.weight-decay", "train_ppo.py"),
    "critic.optim.lr_warmup_steps": ("--critic.optim.warmup-steps", "train_ppo.py; steps; none is 0 (verl: -1)"),
    "critic.model.path": ("--critic.model.path", "train_ppo.py; left out: the policy's own model"),
    "critic.model.enable_gradient_checkpointing": ("--critic.model.gradient-checkpointing", "train_ppo.py"),
    "critic.model.fsdp_config.param_offload": ("--critic.fsdp.param-offload", "train_ppo.py"),
    "critic.model.fsdp_config.optimizer_offload": ("--critic.fsdp.optimizer-offload", "train_ppo.py"),
    "critic.ppo_mini_batch_size": ("", "not needed: the critic uses the policy's mini-batches (--mini-batch-size)"),
    "critic.ppo_epochs": ("--critic.update-epochs", "train_ppo.py; left out: the policy's"),
    "critic.ppo_micro_batch_size_per_gpu": ("", PACKED),
    "critic.ppo_max_token_len_per_gpu": ("--critic.max-tokens-per-gpu", "train_ppo.py; left out: the policy's"),
    "critic.cliprange_value": ("--critic.value-clip", "train_ppo.py"),
    "critic.grad_clip": ("--critic.optim.clip-grad", "train_ppo.py"),
    "ray_init.num_cpus": ("", NO_RAY),
    "ray_kwargs.ray_init.num_cpus": ("", NO_RAY),
    "global_profiler.tool": ("", "profiling " + LATER),
    "actor_rollout_ref.hybrid_engine": ("", ALWAYS),
    "actor_rollout_ref.nccl_timeout": ("", "not needed: ranks wait for the slowest up to 60 minutes"),
    "--config-path": ("", "not needed: there is no YAML, a recipe is a Python file"),
    "--config-name": ("", "not needed: there is no YAML, a recipe is a Python file"),
}

EVALUATION = {
    "data.path": ("--data.files", "eval.py, for main_generation and main_eval; several files separated by spaces"),
    "data.n_samples": ("--rollout.n", "eval.py; responses per prompt"),
    "data.output_path": ("--output", "eval.py; a parquet file"),
    "data.batch_size": ("", "eval.py needs none, the engine schedules all prompts; training has --prompts-per-step"),
    "data.response_key": ("", "not needed: --score-only reads the column responses"),
    "data.data_source_key": ("", "not needed: the column is data_source"),
    "data.reward_model_key": ("", "not needed: the column is reward_model"),
    "merge": ("", "leave it out: merge.py always merges, and has no sub-commands"),
    "test": ("--test-hf-dir", "merge.py, which compares the folder that it has written"),
    "--backend": ("", "not needed: merge.py sees whose checkpoint it is; Megatron's are not taken"),
    "--hf_upload_path": ("--upload", "merge.py"),
    "--hf_model_path": ("", "not needed: the checkpoint's folder huggingface describes the model"),
    "--tie-word-embedding": ("", "not needed: config.json says it"),
    "--is-value-model": ("", "not needed: a critic's config.json says it"),
    "--use_cpu_initialization": ("", "not needed: merging takes no GPU, and host memory for one tensor at a time"),
    "--trust-remote-code": ("", "refused: model folders with their own code are not run"),
}

SECTIONS = {
    "Data": DATA,
    "Algorithm": ALGORITHM,
    "Policy update": UPDATE,
    "Model": MODELS,
    "Reference": REFERENCES,
    "Rollout and validation": ROLLOUTS,
    "Reward": REWARDS,
    "Trainer, critic, launch": TRAINER,
    "Evaluation and merging": EVALUATION,
}

VERL_KEYS: dict[str, tuple[str, str]] = {key: row for section in SECTIONS.values() for key, row in section.items()}

SYNONYMS = {
    "learning-rate": "--optim.lr",
    "batch-size": "--prompts-per-step",
    "num-generations": "--rollout.n",
    "group-size": "--rollout.n",
    "num-epochs": "--total-epochs",
    "epochs": "--total-epochs",
    "max-steps": "--num-steps",
    "beta": "--kl-loss-coef",
    "epsilon": "--loss.clip-low",
    "max-grad-norm": "--optim.clip-grad",
    "output-dir": "--run-dir",
    "model": "--model.path",
    "dataset": "--data.train-files",
    "tensor-parallel-size": "--rollout.tensor-model-parallel-size",
    "max-completion-length": "--rollout.max-response-len",
}
"""What other suites call an option: candidates for the nearest match, never accepted themselves."""

_ROOTS = ("actor_rollout_ref", "algorithm", "critic", "reward_model", "custom_reward_function", "trainer", "hydra")


def verl_hint(word: str, known: Collection[str] | None = None) -> str | None:
    """What to write instead of a word of a verl command (`+key=value`, `~key.key`, `--key`, `--key=value`).

    None: it is not verl's, or may be a value. `known`: the options that the script has, if only these may be named.
    """
    name = word.partition("=")[0].lstrip("+~")
    bare = name.lstrip("-")
    if "=" not in word and not re.match(r"--|~\w+\.", word):
        return None  # a value, not an option
    keys = (name, bare, f"actor_rollout_ref.{bare}")  # the last: main_generation has rollout.* and model.* alone
    key = next((key for key in keys if key in VERL_KEYS), bare)
    if key in VERL_KEYS:
        return _advice(*VERL_KEYS[key], known)
    same_last_part = {row for full, row in VERL_KEYS.items() if full.rpartition(".")[2] == bare}
    if len(same_last_part) == 1:  # `--train_batch_size`; `--path` could be anything
        return _advice(*same_last_part.pop(), known)
    parents = (key.rsplit(".", i)[0] for i in range(1, key.count(".") + 1))
    for parent in parents:
        if parent in VERL_KEYS:
            return _advice(*VERL_KEYS[parent], known)
    if re.match(rf"({'|'.join(_ROOTS)})\.\w", key) or re.match(r"\+\+?\w+\.[\w.]+=", word):
        return "a verl key without a counterpart"
    return None


def _advice(option: str, note: str, known: Collection[str] | None) -> str:
    if not option:
        return note
    section = option.partition(".")[0]
    if known is not None and option not in known:
        if section == "--critic":
            return NO_CRITIC
        has_critic = "--critic.warmup-steps" in known  # of which all advantages but one make no use
        if section in known and note.startswith(f"with {section} ") and not (section == "--advantage" and has_critic):
            return f"use {option} ({note})"
        if section in known:  # of a loss or an advantage that was not chosen
            return f"leave it out: the chosen {section} has no {option}"
        owner = re.match(r"\w+\.py|", note)[0] or "training"
        return f"leave it out: {option} is an option of {owner}"
    return f"use {option} ({note})" if note else f"use {option}"


def markdown() -> str:
    """The tables of docs/from_verl.md."""
    lines = []
    for title, rows in SECTIONS.items():
        lines += [f"## {title}", "", "| verl | here | note |", "|---|---|---|"]
        for key, (option, note) in rows.items():
            here = f"`{option}`" if option else "-"
            lines.append(f"| `{key}` | {here} | {note} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
