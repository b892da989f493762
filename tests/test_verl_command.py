"""A pasted verl command gives back the command of ours that learns the same: on verl's own commands, and key by key."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lib.config.flags import _options, parse_args
from lib.config.verl_command import convert
from lib.config.verl_keys import ANY, VERL_DEFAULTS, VERL_KEYS
from lib.config.verl_words import as_json, entries, read_command
from lib.errors import UserError
from tests.test_verl_hints import values_of
from train_grpo import GRPOConfig
from train_ppo import PPOConfig

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = {"train_grpo.py": GRPOConfig(), "train_ppo.py": PPOConfig()}
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
BASE = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=m", ROLLOUT + "n=4", "data.max_prompt_length=100"]


def verl_commands() -> dict[str, list[str]]:
    """{script: its words} of verl_commands.txt; the variables stay in."""
    text = (ROOT / "tests" / "verl_commands.txt").read_text().replace("\\\n", "")
    blocks = re.findall(r"^# (.*)\n(.*)$", text, re.MULTILINE)
    return {name: shlex.split(words) for name, words in blocks}


COMMANDS = verl_commands()
REFUSED = {
    "b178a3cd ppo_trainer/run_qwen2-7b_rm.sh": (
        "lr_warmup_steps_ratio",
        "lr_warmup_steps_ratio",
        "reward_model.enable",
    ),
    "1dda039b rollout_correction/run_qwen2_5_7b_fsdp_multi_rs.sh": ("the whole: .*--rollout.n 1 is too small",),
}


def converted(words, script="train_grpo.py", parse=parse_args):
    """The lines that are printed when these words are given to a script, and what became of each key."""
    config = CONFIGS[script]
    given = read_command(words)
    assert given is not None, words
    return convert(given, config, _options(config), lambda words: parse(config, words))


def unread(config, words):
    """In place of our parser, which takes half a second: what fits together is not the question."""


def pasted(lines):
    """What a shell starts when the lines are pasted: the launcher's words, the script, and its config."""
    words = shlex.split("\n".join(lines).replace("\\\n", ""), comments=True)
    place = next(i for i, word in enumerate(words) if word.endswith(".py"))
    return words[:place], words[place], parse_args(CONFIGS[words[place]], words[place + 1 :])


@pytest.mark.parametrize("name", COMMANDS)
def test_verls_own_commands_are_taken_by_our_parser_with_verls_meaning(name):
    """Read again from verl's words by plain rules: what decides about learning is in the config that we get."""
    words = COMMANDS[name]
    said = {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in words)}
    lines, conversion = converted(words)
    if name in REFUSED:
        assert len(lines) == len(REFUSED[name]) == len(conversion.refused)
        for line, what in zip(lines, REFUSED[name], strict=True):
            assert re.search(what, line), lines
        return
    launcher, script, cfg = pasted(lines)

    def verl(key, default):
        return said.get(key, default)

    is_ppo = said["algorithm.adv_estimator"] == "gae"
    assert script == ("train_ppo.py" if is_ppo else "train_grpo.py")
    assert f"--nproc_per_node={verl('trainer.n_gpus_per_node', '8')}" in launcher
    assert (f"--nnodes={verl('trainer.nnodes', '1')}" in launcher) == (verl("trainer.nnodes", "1") != "1")
    n = int(verl(ROLLOUT + "n", 1))
    assert (cfg.rollout.n, cfg.prompts_per_step) == (n, int(verl("data.train_batch_size", 1024)))
    assert cfg.mini_batch_size == int(verl(ACTOR + "ppo_mini_batch_size", 256)) * n
    lengths = [int(verl(f"data.max_{which}_length", 512)) for which in ("prompt", "response")]
    assert [cfg.data.max_prompt_len, cfg.rollout.max_response_len] == lengths
    if "trainer.total_training_steps" in said:
        assert cfg.num_steps == int(said["trainer.total_training_steps"])
    else:
        assert cfg.num_steps is None and cfg.total_epochs == int(verl("trainer.total_epochs", 30))
    assert cfg.optim.lr == float(verl(ACTOR + "optim.lr", 1e-6))
    assert cfg.optim.weight_decay == float(verl(ACTOR + "optim.weight_decay", 0.01))
    in_loss = verl(ACTOR + "use_kl_loss", "False").lower() == "true"
    assert cfg.kl_loss_coef == (float(verl(ACTOR + "kl_loss_coef", 0.001)) if in_loss else 0)
    in_reward = verl("algorithm.use_kl_in_reward", "False").lower() == "true"
    assert cfg.kl_reward.coef == (float(verl("algorithm.kl_ctrl.kl_coef", 0.001)) if in_reward else 0)
    assert cfg.entropy_coef == float(verl(ACTOR + "entropy_coeff", 0))
    for side in ("low", "high"):
        if hasattr(cfg.loss, f"clip_{side}"):
            assert getattr(cfg.loss, f"clip_{side}") == float(verl(f"{ACTOR}clip_ratio_{side}", 0.2))
    assert cfg.lora.rank == int(verl("actor_rollout_ref.model.lora_rank", 0))
    assert cfg.correction.is_level == "none" and not cfg.correction.reject and not cfg.correction.bypass
    assert cfg.data.train_files == tuple(entries(said["data.train_files"]))
    assert cfg.data.shuffle == (verl("data.shuffle", "True").lower() == "true")
    if is_ppo:
        assert cfg.critic.model.path == said["critic.model.path"]
        assert cfg.critic.optim.lr == float(verl("critic.optim.lr", 1e-5))
    given = {key.lstrip("+") for key in said}
    assert given == conversion.converted | conversion.below.keys() | (
        given & {"trainer.nnodes", "trainer.n_gpus_per_node"}
    )


def test_both_scripts_give_back_the_same_command():
    for name in ("1dda039b grpo_trainer/run_qwen3_8b_fsdp.sh", "1dda039b ppo_trainer/run_qwen3_8b_fsdp.sh"):
        in_both = [pasted(converted(COMMANDS[name], script)[0]) for script in CONFIGS]
        assert in_both[0] == in_both[1]


# ---- Key by key ----

CONTEXT = {
    ACTOR + "kl_loss": [ACTOR + "use_kl_loss=True"],
    "algorithm.kl": ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive"],
    "algorithm.filter_groups": ["algorithm.filter_groups.enable=True"],
    "algorithm.gamma": ["algorithm.adv_estimator=reinforce_plus_plus"],
    "algorithm.lam": ["algorithm.adv_estimator=gae", "critic.model.path=c"],
    "critic.": ["algorithm.adv_estimator=gae", "critic.model.path=c"],
    "trainer.critic_warmup": ["algorithm.adv_estimator=gae", "critic.model.path=c"],
    ACTOR + "policy_loss.clip_cov": [ACTOR + "policy_loss.loss_mode=clip_cov"],
    ACTOR + "policy_loss.kl_cov": [ACTOR + "policy_loss.loss_mode=kl_cov"],
    ACTOR + "policy_loss.ppo_kl": [ACTOR + "policy_loss.loss_mode=kl_cov"],
    ACTOR + "tau": [ACTOR + "policy_loss.loss_mode=sapo"],
    ACTOR + "optim.lr_warmup_steps_ratio": ["trainer.total_training_steps=100"],
    "critic.optim.lr_warmup_steps_ratio": ["trainer.total_training_steps=100"],
    "actor_rollout_ref.model.lora": ["actor_rollout_ref.model.lora_rank=4"],
    "actor_rollout_ref.model.target": ["actor_rollout_ref.model.lora_rank=4"],
    "actor_rollout_ref.model.exclude": ["actor_rollout_ref.model.lora_rank=4"],
    "algorithm.rollout_correction.rollout_is_": ["algorithm.rollout_correction.rollout_is=token"],
    "algorithm.rollout_correction.rollout_rs_threshold": ["algorithm.rollout_correction.rollout_rs=seq_mean_k1"],
    "algorithm.rollout_correction.rollout_rs": ["algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0"],
    "algorithm.rollout_correction.loss_type": ["algorithm.rollout_correction.bypass_mode=True"],
    ROLLOUT + "multi_turn": [f"{ROLLOUT}multi_turn.tool_config_path={ROOT / 'tests' / 'verl_tools.yaml'}"],
    "reward": ["reward.reward_manager.name=dapo"],
    "reward.reward_kwargs.overlong": ["reward.reward_kwargs.overlong_buffer_cfg.enable=True"],
    "reward_model.reward_kwargs.overlong": ["reward_model.reward_kwargs.overlong_buffer_cfg.enable=True"],
    "reward_model.overlong": ["reward_model.overlong_buffer.enable=True"],
}
"""What must stand beside a key, by the beginnings of keys, so that verl reads it at all."""
OTHER = {
    "False": "True", "True": "False", "null": "7", "{}": "7", "constant": "cosine", "vanilla": "gspo",
    "auto": "disable",
    "ppo_clip": "reinforce", "adaptive": "fixed", "fixed": "adaptive", "kl": "abs", "low_var_kl": "abs", "[]": "7",
    "error": "left", "token-mean": "seq-mean-token-mean", "all-linear": "q_proj", "disabled": "decoupled_seq_is",
    "gae": "rloo", "bfloat16": "float16", "[0.9, 0.999]": "[0.9, 0.95]", "-1": "5", "compute_score": "other",
}  # fmt: skip
SPECIAL = {
    "algorithm.rollout_correction.rollout_is": "token", "algorithm.rollout_correction.rollout_rs": "seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold": "0.9_1.1", "critic.ppo_epochs": "3",
    ACTOR + "optim.lr_warmup_steps_ratio": "0.1", "critic.optim.lr_warmup_steps_ratio": "0.1",
    "data.apply_chat_template_kwargs": "{a: 1}", "custom_reward_function.reward_kwargs": "{a: 1}",
    "reward.custom_reward_function.reward_kwargs": "{a: 1}", "critic.optim.lr_warmup_steps": "3",
    "algorithm.filter_groups.enable": "True",
}  # fmt: skip


def another_value(key):
    default = VERL_DEFAULTS[key]
    if key in SPECIAL:
        return SPECIAL[key]
    if default in OTHER:
        return OTHER[default]
    try:
        return f"{float(default) * 2 or 0.5:g}" if "." in default or "e" in default else str(int(default) * 2 or 3)
    except ValueError:
        return "7"


@pytest.mark.parametrize("key", [key for key in VERL_KEYS if VERL_DEFAULTS[key] != ANY and not key.startswith("-")])
def test_a_key_that_changes_what_is_learned_is_converted_or_refused(key):
    """Another value than verl's default is never among what has no counterpart, and changes our command."""
    if key in ("critic.enable", "critic.model.path", "algorithm.adv_estimator"):
        return  # which script is started says them; the others have tests of their own
    beside = [word for start, words in CONTEXT.items() if key.startswith(start) for word in words]
    said = [*BASE, *(word for word in beside if not word.startswith(key + "="))]
    script = "train_ppo.py" if "algorithm.adv_estimator=gae" in said else "train_grpo.py"
    lines, conversion = converted([*said, f"{key}={another_value(key)}"], script, unread)
    before, _ = converted(said, script, unread)
    assert key not in conversion.below, lines
    if key in conversion.refused:
        assert lines[0].startswith("refused: "), lines
    else:
        assert key in conversion.converted and not conversion.refused and lines != before, lines


def test_every_option_of_the_table_is_reached_by_its_key():
    """With values as verl's commands have them; what a chosen loss does not read is said below."""
    for key, (option, _) in VERL_KEYS.items():
        if not option or "." not in key or key.startswith(("-", "data.path", "data.n_samples", "data.output_path")):
            continue
        for value in values_of(key):
            _, conversion = converted([*BASE, f"{key}={value}"], parse=unread)
            known = conversion.converted | conversion.below.keys() | conversion.refused.keys()
            assert key in known, (key, value)


def test_verls_defaults_are_written_out_where_ours_differ():
    _, _, cfg = pasted(converted(["actor_rollout_ref.model.path=m", "algorithm.adv_estimator=reinforce_plus_plus"])[0])
    assert (cfg.rollout.n, cfg.prompts_per_step, cfg.mini_batch_size, cfg.total_epochs) == (1, 1024, 256, 30)
    assert cfg.correction.is_level == "none" and cfg.data.train_files[0].endswith("data/rlhf/gsm8k/train.parquet")
    for name, bounds in {"gspo": (0.2, 0.2), "cispo": (0.2, 0.2), "geo_mean": (0.2, 0.2)}.items():
        _, _, cfg = pasted(converted([*BASE, f"{ACTOR}policy_loss.loss_mode={name}"])[0])
        assert (cfg.loss.clip_low, cfg.loss.clip_high) == bounds, "ours are each loss's own"
    _, _, cfg = pasted(converted([*BASE, "actor_rollout_ref.model.lora_rank=8"])[0])
    assert (cfg.lora.rank, cfg.lora.alpha) == (8, 16.0)
    _, _, cfg = pasted(converted([*BASE, "algorithm.filter_groups.enable=True"])[0])
    assert cfg.filter_groups.enable and not cfg.filter_groups.keep_surplus and cfg.filter_groups.max_rounds > 10**6


def test_verls_defaults_of_a_critic_are_ours():
    """So they need not be written out where train_grpo.py, which does not know them, gives back a train_ppo.py."""
    lines, conversion = converted(["algorithm.adv_estimator=gae", "critic.model.path=c", *BASE[1:]], "train_ppo.py")
    told = [line for line in lines if "--critic" in line and not line.startswith("#")]
    assert [line.split()[0] for line in told] == ["--critic.model.path"]
    assert any(option.startswith("--critic.optim") for option in conversion.unsaid)


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ("critic.model.path=c algorithm.adv_estimator=gae trainer.critic_warmup=20", ["--critic.warmup-steps 19"]),
        ("algorithm.adv_estimator=rloo_vectorized", ["--advantage rloo"]),
        (f"{ACTOR}use_dynamic_bsz=True {ACTOR}ppo_max_token_len_per_gpu=500", ["--max-tokens-per-gpu 612"]),
        ("data.max_response_length=20000", ["--max-tokens-per-gpu 20100"]),
        (f"{ROLLOUT}val_kwargs.do_sample=True {ROLLOUT}val_kwargs.temperature=0.6", ["--eval.temperature 0.6"]),
        (f"{ROLLOUT}val_kwargs.temperature=0.6 {ROLLOUT}val_kwargs.n=4", ["not --eval.n", "not --eval.temp"]),
        (f"{ROLLOUT}max_num_batched_tokens=1536", ["--rollout.max-num-batched-tokens 2048"]),
        (f"{ROLLOUT}cudagraph_capture_sizes=[1,2,64]", ["--rollout.max-cudagraph-capture-size 64"]),
        ("+data.apply_chat_template_kwargs.a=False", ["--data.chat-template-kwargs '{\"a\": false}'"]),
        (
            f"{ACTOR}optim.lr_warmup_steps_ratio=0.05 trainer.total_training_steps=50",
            ["--optim.warmup-steps 2", "--num-steps 50", "not --total-epochs"],
        ),
        (
            "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=0.5_5.0",
            ["--correction none", "--correction.is-level token", "--correction.icepop-low 0.5",
             "--correction.is-threshold 5.0"],
        ),
        (
            "algorithm.rollout_correction.rollout_rs=token_k1,seq_max_k2 "
            "algorithm.rollout_correction.rollout_rs_threshold=0.5_1.25,2.5",
            ["--correction none", """--correction.reject '{"token_k1": [0.8, 2.0], "seq_max_k2": 2.5}'"""],
        ),
        (
            "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=true reward_model.reward_manager=dapo "
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=128",
            ["--overlong.buffer-len 128", "--overlong.factor 0.0"],
        ),
        (
            f"{ACTOR}policy_loss.loss_mode=dppo_tv",
            ["--loss dppo_tv", "--loss.max-ratio 3.0", "--loss.clip-low 0.2", "--loss.clip-high 0.2"],
        ),
        (f"{ACTOR}clip_ratio_c=10.0 {ACTOR}clip_ratio_high=0.28", ["--loss.clip-dual 10.0", "--loss.clip-high 0.28"]),
        ("custom_reward_function.name=null custom_reward_function.path=r.py", ["--reward.path r.py", "not --reward.n"]),
        ("trainer.test_freq=-1 trainer.resume_mode=disable", ["--eval.every 0", "--checkpoint.resume never"]),
        ('trainer.logger=["console","wandb"]', ["--tracking.wandb-project verl_examples"]),
        ("trainer.logger=[console] trainer.project_name=p", ["not --tracking.wandb-project"]),
        (
            "actor_rollout_ref.model.lora_adapter_path=$A actor_rollout_ref.model.lora_rank=8",
            ["--lora.path $A", "not --lora.rank", "not --lora.alpha"],
        ),
        (f"{ACTOR}tis_imp_ratio_cap=2", ["--correction none", "--correction.is-level token"]),
        ("trainer.n_gpus_per_node=4 trainer.nnodes=1", ["torchrun --nproc_per_node=4 train_grpo.py"]),
    ],
)  # fmt: skip
def test_values_are_converted(words, lines):
    base = BASE[1:] if "adv_estimator" in words else BASE
    printed, _ = converted([*base, *words.split()])
    command = [line.strip().removesuffix(" \\") for line in printed]
    assert "$" in words or pasted(printed)
    for line in lines:
        if line.startswith("not "):
            assert not any(other.startswith(line.removeprefix("not ")) for other in command)
        else:
            assert line in command, printed


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (f"{ACTOR}clip_ratio=0.1", "clip_ratio=0.1: verl reads clip_ratio_low and clip_ratio_high"),
        ("algorithm.adv_estimator=my_own", "adv_estimator=my_own: no --advantage of that name; there are grpo"),
        (f"{ACTOR}policy_loss.loss_mode=mine", "loss_mode=mine: no --loss of that name"),
        (f"{ROLLOUT}top_k=50", "top_k=50: the sampler would draw from another distribution"),
        ("actor_rollout_ref.rolout.n=5", "rolout.n=5: not known here.*nearest is actor_rollout_ref.rollout.n"),
        (f"{ROLLOUT}top_p=0.9", "top_p=0.9: the sampler would draw from another distribution"),
        (f"{ACTOR}use_kl_loss=$KL", "use_kl_loss=.KL: True or False is needed here"),
        (f"{ACTOR}optim.lr_warmup_steps_ratio=$R", "ratio=.R: a number is needed here"),
        ("trainer.critic_warmup=$W", "critic_warmup=.W: a number is needed here"),
        ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=$T", "type=.T: fixed or adaptive is needed"),
        ("reward_model.reward_manager=$X", "reward_manager=.X: not needed: .*; taken with naive or prime or"),
        ("+reward_model.reward_kwargs.my_own=1", "my_own=1: not offered"),
        ("reward_model.reward_loop_class_name=Mine", "class_name=Mine: not offered"),
        (f"{ACTOR}brand_new_knob=3", "brand_new_knob=3: not known here, so it may change what is learned"),
        ("algorithm.rollout_correction.new_knob=3", "new_knob=3: not known here"),
        (f"{ACTOR}optim.lr=1e-5 ~{ACTOR}optim.weight_decay", "weight_decay: a key is taken away"),
        ("data.train_files=", "data.train_files=: it has no value"),
        (f"{ACTOR}ppo_mini_batch_size=${{data.train_batch_size}}", "a reference to another key"),
        ("--config-name=my_own", "--config-name=my_own: a YAML may hold keys"),
        (f"{ROLLOUT}max_model_len=300", "max_model_len=300: it would cut responses below 612 tokens"),
        ("trainer.critic_warmup=5", "critic_warmup=5: there is no critic"),
        ("algorithm.adv_estimator=gae", "critic.model.path: not given, and verl's is"),
        ("reward_model.enable=True", "reward_model.enable=True: not yet: reward models"),
        (f"{ACTOR}optim.clip_grad=2 {ACTOR}grad_clip=3", "another key has set --optim.clip-grad to 2"),
        ("data.train_batch_size=100", "the whole: .*does not divide"),
        ("algorithm.rollout_correction.rollout_rs=token_k1", "rollout_rs_threshold: a bound above 0"),
        ("data.apply_chat_template_kwargs=fast", "apply_chat_template_kwargs=fast: a dictionary is needed"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_its_reason(words, why):
    base = BASE[1:] if "adv_estimator" in words else BASE
    lines, conversion = converted([*base, *words.split()])
    assert conversion.refused and any(re.match("refused: .*" + why, line) for line in lines), lines
    assert not any(line.startswith("torchrun") for line in lines)


def test_what_is_not_there_yet_says_so():
    for key in (ACTOR + "ulysses_sequence_parallel_size", "global_profiler.x"):
        lines, _ = converted([*BASE, f"{key}=4"])
        assert any(line.startswith(f"#   {key}=4: not yet: ") for line in lines), lines


# ---- Words ----


def test_a_command_is_read_as_the_shell_and_hydra_would():
    text = """python3 -m verl.trainer.main_ppo --config-name='ppo_trainer.yaml' \\
        algorithm.adv_estimator=grpo +data.x="['$HOME/a b.parquet', '$HOME/b']" \\
        ++trainer.logger='["console","wandb"]' ~trainer.x data.seed=1 data.seed=2 $@"""
    assert read_command([text]) == {
        "--config-name": "ppo_trainer.yaml",
        "algorithm.adv_estimator": "grpo",
        "data.x": "['$HOME/a b.parquet', '$HOME/b']",
        "trainer.logger": '["console","wandb"]',
        "~trainer.x": "",
        "data.seed": "2",
    }
    assert entries("['$HOME/a b.parquet', '$HOME/b']") == ["$HOME/a b.parquet", "$HOME/b"]
    assert entries('["console","wandb"]') == entries("[console, wandb]") == ["console", "wandb"]
    assert entries("'a'") == ["a"] and entries("[]") == entries("null") == []
    assert as_json("{a: True, b: [1, 0.5, x], 'c d': {e: null}}") == {"a": True, "b": [1, 0.5, "x"], "c d": {"e": None}}


def test_only_a_whole_command_is_converted():
    for words in (
        ["data.train_batch_size=8"],
        ["data.train_batch_size=8", "data.max_prompt_length=5"],  # a data section is ours too
        ["trainer.nnodes=1", "data.train_batch_size=8", "--num-steps", "3"],
        ["--data.train-files", "trainer.x=1", "trainer.y=2"],
        [],
    ):
        assert read_command(words) is None, words


def test_variables_of_the_shell_stay_variables():
    words = 'data.train_files=$HOME/a.parquet actor_rollout_ref.model.path="$M odel" data.train_batch_size=$B'
    lines, _ = converted([" ".join([*BASE[:1], *BASE[2:], words, f"{ACTOR}ppo_mini_batch_size=$MINI"])])
    text = "\n".join(lines)
    assert "--data.train-files $HOME/a.parquet" in text and '--model.path "$M odel"' in text
    assert "--prompts-per-step $B" in text and '--mini-batch-size "$(($MINI * 4))"' in text
    shown = subprocess.run(
        ["bash", "-c", text.replace("torchrun", "printf '%s\\n'")],
        env={**os.environ, "HOME": "/h", "M": "m", "B": "32", "MINI": "8"}, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert {"/h/a.parquet", "m odel", "32"} <= set(shown) and shown[shown.index("--mini-batch-size") + 1 :][0] in (
        "32",
        "$((",
    )


def test_a_secret_is_not_shown(capsys):
    words = [*BASE, "ray_kwargs.ray_init.runtime_env.env_vars.API_KEY=abcdefghi", "data.val_batch_size=3"]
    words += ["custom_reward_function.path=r.py", "+custom_reward_function.reward_kwargs.api_key=jklmnopqr"]
    with pytest.raises(UserError):
        parse_args(GRPOConfig(), words)
    shown = capsys.readouterr().out
    assert "abcdefghi" not in shown and "jklmnopqr" not in shown
    assert "API_KEY=..." in shown and '"api_key": "[api_key]"' in shown and "stands for a secret" in shown


def test_nothing_is_run_and_the_exit_code_is_2():
    """As a user sees it; both scripts start in the same way, so each shows one case."""
    words = COMMANDS["1dda039b ppo_trainer/run_qwen3_8b_fsdp.sh"]
    ended = subprocess.run([sys.executable, ROOT / "train_grpo.py", *words], capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.startswith("error[2] a verl command, so nothing is run;"), (
        ended.stderr
    )
    assert ended.stdout.startswith("torchrun --nproc_per_node=8 train_ppo.py \\\n    --model.path Qwen/Qwen3-8B \\\n")
    assert pasted(ended.stdout.splitlines())[1] == "train_ppo.py"
    words = [*words, "algorithm.use_pf_ppo=True"]
    ended = subprocess.run([sys.executable, ROOT / "train_ppo.py", *words], capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stdout.startswith(
        "refused: algorithm.use_pf_ppo=True: PF-PPO is not offered"
    )
    assert len(ended.stderr.splitlines()) == 1 and "found 1 of its 4" in ended.stderr


def test_the_migration_pages_example_is_what_is_printed():
    page = (ROOT / "docs" / "from_verl.md").read_text()
    verl, ours, *_ = re.findall(r"```\n(.*?)```", page, re.DOTALL)
    lines, _ = converted([verl])
    assert "\n".join(lines).split("\n\n")[0] == ours.strip()
    assert json.dumps(lines).count("not needed") > 3


def test_what_a_user_of_verl_would_not_expect_is_said():
    words = ["trainer.save_freq=4", "trainer.project_name=p", "trainer.experiment_name=e",
             f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm"]  # fmt: skip
    lines, conversion = converted([*BASE, *words])
    text = "\n".join(lines)
    assert not conversion.refused and "--run-dir runs/p/e" in text
    assert "# verl keeps every checkpoint; ours the newest 2 and the best" in text
    assert "# verl divides that loss by the padded length of each micro-batch; ours by --rollout" in text
    quiet = "\n".join(converted([*BASE, "trainer.default_local_dir=runs/x", "trainer.experiment_name=e"])[0])
    assert "--run-dir runs/x" in quiet and "verl keeps" not in quiet and "verl divides" not in quiet
