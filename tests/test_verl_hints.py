"""Following a hint for a pasted verl key leads into no second error: every key of the table, in every script."""

import re
from collections import defaultdict

import pytest

from eval import EvalScriptConfig
from lib.config.flags import option_names, parse_args
from lib.config.verl_keys import VERL_KEYS
from lib.errors import UserError
from merge import MergeConfig
from train_grpo import GRPOConfig
from train_ppo import PPOConfig

SCRIPTS = {"train_grpo": GRPOConfig(), "train_ppo": PPOConfig(), "eval": EvalScriptConfig(), "merge": MergeConfig()}
VALUES = {
    **dict.fromkeys(("train_files", "val_files", "data.path", "output_path"), ("a.parquet",)),
    **dict.fromkeys(("train_batch_size", "ppo_mini_batch_size", "ppo_epochs", "total_epochs", "n_samples"), ("4",)),
    **dict.fromkeys(("max_prompt_length", "max_response_length", "prompt_length", "response_length"), ("512",)),
    **dict.fromkeys(("ppo_max_token_len_per_gpu", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu"), ("4096",)),
    **dict.fromkeys(("seed", "data_loader_seed", "horizon", "max_num_gen_batches", "num_workers", "n"), ("3",)),
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "cudagraph_capture_sizes", "len"), ("8",)),
    **dict.fromkeys(("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"), ("1", "None")),
    **dict.fromkeys(("train_max_samples", "val_max_samples"), ("-1", "5")),
    **dict.fromkeys(("test_freq", "save_freq", "lr_warmup_steps"), ("-1", "5")),
    **dict.fromkeys(("lr", "weight_decay", "eps", "gamma", "lam", "kl_coef", "target_kl", "kl_loss_coef"), ("0.1",)),
    **dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high", "entropy_coeff", "dro_beta"), ("0.2",)),
    **dict.fromkeys(("clip_cov_ratio", "clip_cov_lb", "kl_cov_ratio", "ppo_kl_coef", "tau_pos", "tau_neg"), ("0.2",)),
    **dict.fromkeys(("clip_ratio_c", "clip_cov_ub", "tis_imp_ratio_cap", "cliprange_value"), ("3.0",)),
    **dict.fromkeys(("temperature", "top_p", "grad_clip", "clip_grad"), ("1.0",)),
    **dict.fromkeys(("rollout_is_threshold", "loss_scale_factor", "penalty_factor", "min_lr_ratio"), ("1.0",)),
    **dict.fromkeys(("filter_overlong_prompts", "shuffle", "norm_adv_by_std_in_grpo", "enable"), ("True", "False")),
    **dict.fromkeys(("use_kl_in_reward", "use_kl_loss", "rollout_is_batch_normalize"), ("True", "False")),
    **dict.fromkeys(("param_offload", "optimizer_offload", "offload_policy"), ("True", "False")),
    **dict.fromkeys(("reshard_after_forward", "enable_gradient_checkpointing", "do_sample"), ("True", "False")),
    **dict.fromkeys(("ignore_eos", "enforce_eager", "enable_prefix_caching", "free_cache_engine"), ("True", "False")),
    **dict.fromkeys(("enable_sleep_mode", "calculate_log_probs", "val_before_train"), ("True", "False")),
    **dict.fromkeys(("custom_cls.name", "function.name", "project_name", "experiment_name"), ("my_name",)),
    **dict.fromkeys(("custom_cls.path", "function.path", "model.path", "default_local_dir", "test"), ("a/b",)),
    **dict.fromkeys(("prompt_key", "stop", "filter_groups.metric", "upload_path", "resume_from_path"), ("word",)),
    **dict.fromkeys(("max_assistant_turns", "max_user_turns", "max_parallel_calls"), ("3",)),
    **dict.fromkeys(("tool_config_path", "interaction_config_path", "function_tool_path"), ("tools.yaml",)),
    **dict.fromkeys(("kl_penalty", "kl_loss_type"), ("kl", "low_var_kl", "k3+")),
    **dict.fromkeys(("lr_scheduler_type", "warmup_style"), ("constant", "cosine")),
    **dict.fromkeys(("apply_chat_template_kwargs", "reward_kwargs"), ('{"a": false}',)),
    "fsdp_config.dtype": ("bfloat16", "float32"), "rollout.dtype": ("bfloat16",), "resume_mode": ("auto", "disable"),
    "truncation": ("error", "left"), "adv_estimator": ("grpo", "rloo"), "kl_ctrl.type": ("fixed", "adaptive"),
    "loss_mode": ("vanilla", "gspo"), "loss_agg_mode": ("token-mean",), "betas": ("[0.9,0.99]",),
    "logger": ("console",), "critic_warmup": ("0", "5"),
    "lr_warmup_steps_ratio": ("0.1",), "total_training_steps": ("9", "None"), "gdpo_reward_keys": ("[score]",),
    "gdpo_reward_weights": ("[1.0]",), "rollout_correction": ("decoupled_seq_is",), "rollout_is": ("null", "token"),
    "rollout_rs": ("seq_mean_k1",), "rollout_rs_threshold": ("0.5_2.0",), "loss_type": ("ppo_clip", "reinforce"),
    "bypass_mode": ("False", "True"), "gpu_memory_utilization": ("0.5",), "top_k": ("-1",),
    "tensor_model_parallel_size": ("2",), "lora_rank": ("8",), "lora_alpha": ("32",), "target_modules": ("all-linear",),
    "exclude_modules": ("null",), "lora_adapter_path": ("adapter",), "max_tool_response_length": ("256",),
    "multi_turn.format": ("hermes", "qwen3_coder"),
}  # fmt: skip
"""Values as verl's commands have them, by the end of a key."""
TOLD = {
    **dict.fromkeys(("[0.9,0.99]", "[score]", "[1.0]"), ("brackets", "separated by a space")),
    "disable": ("never for disable",), "seq_mean_k1": ("as JSON",), "0.5_2.0": ("bounds the inverse",),
    "tools.yaml": ("a file that imports", "as tool_config_path", "--turns.name with"), "256": ("another unit",),
    "qwen3_coder": ("qwen3-coder",), "0.1": ("another unit",), "console": ("console",),
    "adapter": ("a folder as peft writes it",),
}  # fmt: skip
"""How a hint says that a value is written otherwise; else it names the value."""


def values_of(key):
    ends = [end for end in VALUES if key == end or key.endswith(("." + end, "_" + end))]
    assert ends, f"no value for {key}"
    return VALUES[max(ends, key=len)]


def refusal(config, words):
    """What the command line is refused with; empty: it is not."""
    try:
        parse_args(config, words)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_hint_says_to_use_parses_in_the_script_that_gave_it(script):
    """With the value that was pasted, unless the hint says how it is written here."""
    config, known, count = SCRIPTS[script], option_names(SCRIPTS[script]), 0
    rounds = defaultdict(dict)  # (words before, which value) -> {option: value}: of equal options the last would count
    for key, (option, note) in VERL_KEYS.items():
        for which, value in enumerate(values_of(key) if option else ("1",)):
            message = refusal(config, [f"{key}={value}"])
            hint = message.partition(f"command line; {key}: ")[2].rpartition("; --help and docs")[0]
            if not hint.startswith("use --"):
                assert "use --" not in hint and (note in hint or option in hint or "PPO's critic" in hint), message
                continue
            count += 1
            assert hint.startswith(f"use {option}"), message
            chosen = re.match(r"with (--\w+) (\w+)", note)
            words = chosen.groups() if chosen and (option not in known or chosen[1] == "--correction") else ()
            hows = TOLD.get(value, (re.escape(value),)) + (("training only",) if script == "eval" else ())
            if not any(re.search(how, hint) for how in hows):
                rounds[words, which][option] = value
            elif words:
                assert "unknown" not in refusal(config, [*words, option, value]), message
    assert count > {"train_grpo": 150, "train_ppo": 150, "eval": 30, "merge": 1}[script]
    base = ["--output", "answers.parquet"] if script == "eval" else []
    for (words, _), pairs in rounds.items():
        assert not refusal(config, [*base, *words, *(word for pair in pairs.items() for word in pair)])


@pytest.mark.parametrize(
    ("script", "word", "said"),
    [
        ("train_grpo", "trainer.critic_warmup=0", "leave it out, or start train_ppo.py"),
        ("train_ppo", "trainer.critic_warmup=0", "use --critic.warmup-steps"),
        ("train_grpo", "algorithm.use_kl_in_reward=False", "for False leave it out"),
        ("train_grpo", "actor_rollout_ref.actor.policy_loss.dro_beta=1", "use --loss.dro-beta (with --loss dro)"),
        ("eval", "data.train_batch_size=8", "leave it out: --prompts-per-step is an option of training"),
        ("eval", "actor_rollout_ref.actor.policy_loss.dro_beta=1", "leave it out: --loss.dro-beta is an option of tr"),
        ("train_grpo", "data.output_path=a", "leave it out: --output is an option of eval.py"),
    ],
)
def test_a_hint_knows_which_script_it_is_given_in(script, word, said):
    assert said in refusal(SCRIPTS[script], [word])


def test_a_hint_knows_which_loss_was_chosen():
    text = refusal(GRPOConfig(), ["--loss", "gpg", "actor_rollout_ref.actor.clip_ratio_low=0.2"])
    assert "leave it out: the chosen --loss has no --loss.clip-low" in text
