"""What an evaluation takes from the run that trained its model, or from the model; what is given always wins."""

import hashlib
import json
import shlex
from dataclasses import replace

import pytest

from eval import EvalScriptConfig
from lib.config.as_json import to_json
from lib.config.flags import parse_args
from lib.data.prompts import DataConfig
from lib.dist import SINGLE
from lib.engine.rollout_config import RolloutConfig
from lib.errors import UserError
from lib.evaluation.of_model import complete
from lib.launch.train_config import TrainConfig
from lib.rewards.scoring import RewardConfig
from lib.turns.config import TurnsConfig
from lib.turns.kinds import Kinds
from lib.turns.start import Turns
from tests.tiny import make_model

REWARD = "def judge(data_source, solution_str, ground_truth, extra_info, scale): return scale\n"
DATA = DataConfig(
    train_files=("a.jsonl",), prompt_key="q", answer_key="a", max_prompt_len=24, control_tokens="split",
    chat_template_kwargs={"enable_thinking": False}, filter_overlong_prompts=True, truncation="left",
)  # fmt: skip
ROLLOUT = RolloutConfig(n=16, max_response_len=12, temperature=0.7, stop=("###", "the end"))


def save_run(folder, **sections):
    """A checkpoint as `find_actor` knows one, of a run with this config."""
    checkpoint = folder / "run" / "global_step_3"
    for name in ("model", "huggingface"):
        (checkpoint / "actor" / name).mkdir(parents=True, exist_ok=True)
    reward = sections.get("reward", RewardConfig())
    note = "reward: lib.rewards.arithmetic for arithmetic"
    if reward.path:
        digest = hashlib.sha256((folder / reward.path).read_bytes()).hexdigest()[:16]
        note = f"reward: judge in {reward.path} (sha256 {digest})"
    trainer = {"config": to_json(TrainConfig(**{"data": DATA, "rollout": ROLLOUT, **sections})), "reward": note}
    if "turns" in sections:
        kinds = Kinds({}, file_hash=hashlib.sha256((folder / sections["turns"].path).read_bytes()).hexdigest()[:16])
        trainer["turns"] = Turns(cfg=sections["turns"], kinds=kinds, format=None, notes=()).in_words
    (checkpoint / "trainer.json").write_text(json.dumps(trainer))
    return str(checkpoint)


def completed(path, *argv, samples=True, scores=True):
    argv = ["--output", "x.parquet", "--model.path", path, *argv]
    cfg = parse_args(EvalScriptConfig(), argv)
    return complete(cfg, argv, cfg.model.path, SINGLE, samples=samples, scores=scores)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The reward of a run that was started in the working directory."""
    (tmp_path / "reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    return RewardConfig(path="reward.py", name="judge", kwargs={"scale": 2}, timeout_s=30.0, batch_size=7)


def test_a_runs_lengths_template_arguments_stop_strings_and_reward_are_taken_and_told_in_one_line(tmp_path, mine):
    checkpoint = save_run(tmp_path, reward=mine)
    cfg, line = completed(checkpoint)
    assert (cfg.data.max_prompt_len, cfg.rollout.max_response_len, cfg.rollout.stop) == (24, 12, ("###", "the end"))
    assert cfg.data.chat_template_kwargs == {"enable_thinking": False} and cfg.data.control_tokens == "split"
    assert (cfg.data.prompt_key, cfg.data.answer_key) == ("q", "a") and cfg.reward == mine
    assert (cfg.rollout.n, cfg.rollout.temperature) == (1, 0.0)  # how an evaluation samples is its own
    assert (cfg.data.filter_overlong_prompts, cfg.data.truncation, cfg.data.files) == (False, "error", ())
    assert line == (
        f"taken from the run of {checkpoint}: --data.prompt-key q --data.answer-key a --data.max-prompt-len 24 "
        "--data.chat-template-kwargs '{\"enable_thinking\": false}' --data.control-tokens split "
        "--rollout.max-response-len 12 --rollout.stop '###' 'the end' --reward.path reward.py --reward.name judge "
        "--reward.kwargs '{\"scale\": 2}' --reward.batch-size 7 --reward.timeout-s 30.0"
    )
    pasted, _ = completed("", *shlex.split(line.partition(": ")[2]))
    assert (pasted.data, pasted.rollout, pasted.reward) == (cfg.data, cfg.rollout, cfg.reward)
    of_actor, _ = completed(f"{checkpoint}/actor")
    assert (of_actor.data, of_actor.rollout, of_actor.reward) == (cfg.data, cfg.rollout, cfg.reward)


def test_what_is_given_wins_however_it_is_written(tmp_path, mine):
    checkpoint = save_run(tmp_path, reward=mine)
    for argv in (
        ("--data.max-prompt-len", "512", "--rollout.stop", "--reward.timeout-s", "10"),
        ("--data.max_prompt_len=512", "--rollout.stop", "--reward.timeout_s=10.0"),
    ):
        cfg, line = completed(checkpoint, *argv)
        assert (cfg.data.max_prompt_len, cfg.rollout.stop, cfg.reward.timeout_s) == (512, (), 10.0)
        assert (cfg.rollout.max_response_len, cfg.reward.path) == (12, "reward.py")
        assert not any(option in line for option in ("max-prompt-len", "stop", "timeout-s"))
    for argv, path in ((("--reward.path", "None"), None), (("--reward.path", "other.py"), "other.py")):
        cfg, line = completed(checkpoint, *argv)
        assert cfg.reward == RewardConfig(path=path) and "--reward" not in line  # another file's keywords are no use


def test_only_what_the_evaluation_does_is_taken(tmp_path, mine):
    checkpoint = save_run(tmp_path, reward=mine)
    cfg, line = completed(checkpoint, "--generate-only", scores=False)
    assert cfg.reward == RewardConfig() and "--reward" not in line and cfg.data.max_prompt_len == 24
    cfg, line = completed(checkpoint, "--score-only", samples=False)
    assert cfg.reward == mine and cfg.data.answer_key == "a" and "-len" not in line and cfg.rollout.stop == ()
    assert completed("", "--score-only", samples=False)[1] is None


def test_a_run_with_defaults_says_nothing(tmp_path):
    checkpoint = save_run(tmp_path, data=DataConfig(train_files=("a",)), rollout=RolloutConfig())
    assert completed(checkpoint)[1] is None


def test_a_reward_file_that_changed_is_told_and_one_that_is_gone_is_refused(tmp_path, mine, monkeypatch):
    checkpoint = save_run(tmp_path, reward=mine)
    (tmp_path / "reward.py").write_text(REWARD + "\n")
    assert completed(checkpoint)[1].startswith(
        f"taken from the run of {checkpoint}, whose reward file has changed since: "
    )
    (tmp_path / "reward.py").unlink()
    with pytest.raises(UserError, match=r"the file of the run's reward is not there; .*found no reward.py in .*None: "):
        completed(checkpoint)
    for argv in (("--reward.path", "None"), ("--reward.path", "other.py")):
        completed(checkpoint, *argv)
    completed(checkpoint, "--generate-only", scores=False)


def test_a_secret_that_the_run_did_not_keep_is_asked_for(tmp_path, mine):
    secret = RewardConfig(path="reward.py", name="judge", kwargs={"judge": {"api_key": "canary-2f9c41d7"}})
    checkpoint = save_run(tmp_path, reward=secret)
    with pytest.raises(
        UserError, match=r"given a secret, .*'\{\"judge\": \{\"api_key\": \"\[api_key\]\"\}\}'.*give --reward.kwargs"
    ):
        completed(checkpoint)
    cfg, line = completed(checkpoint, "--reward.kwargs", '{"scale": 3}')
    assert cfg.reward.kwargs == {"scale": 3} and cfg.reward.name == "judge" and "reward.kwargs" not in line


@pytest.mark.parametrize("text", [None, "", "{}", "[]", '{"config": 3}', '{"config": {}}', "\xff", "[" * 100_000])
def test_a_checkpoint_without_a_config_gives_nothing(tmp_path, text):
    checkpoint = save_run(tmp_path)
    trainer = tmp_path / "run/global_step_3/trainer.json"
    trainer.unlink()
    if text is not None:
        trainer.write_bytes(text.encode("latin1"))
    cfg, line = completed(checkpoint)
    assert line is None and cfg.data.max_prompt_len == 512 and cfg.reward == RewardConfig()


# ---- Of a model ----


@pytest.mark.parametrize(
    ("argv", "lengths"),
    [
        ((), (64, 64)),
        (("--rollout.max-response-len", "100"), (28, 100)),
        (("--data.max-prompt-len", "1"), (1, 127)),
        (("--rollout.max-response-len=20",), (108, 20)),
        (("--data.max-prompt-len", "100", "--rollout.max-response-len", "100"), (100, 100)),  # refused: both are given
        (("--rollout.max-response-len", "128"), (512, 128)),  # refused: there is no prompt
    ],
)
def test_a_plain_models_default_lengths_are_what_fits_it(tmp_path, argv, lengths):
    path = make_model(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    cfg, line = completed(str(path), *argv)
    assert (cfg.data.max_prompt_len, cfg.rollout.max_response_len) == lengths
    if sum(lengths) <= 128:
        told = {"--data.max-prompt-len": lengths[0], "--rollout.max-response-len": lengths[1]}
        given = {word.partition("=")[0] for word in argv}
        assert line == f"taken from the model {path}: " + " ".join(
            f"{option} {value}" for option, value in told.items() if option not in given
        )
    else:
        assert line is None
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    assert completed(str(path))[1] is None


def test_what_is_no_local_folder_is_left_to_the_checks_that_follow(tmp_path):
    for path in ("", "Qwen/Qwen3-0.6B", str(tmp_path / "missing"), str(tmp_path)):
        cfg, line = completed(path)
        assert line is None and cfg.data.max_prompt_len == 512


# ---- Of a run with turns ----


@pytest.fixture
def turns(tmp_path, mine):
    """Of a run that was started in the working directory."""
    (tmp_path / "game.py").write_text("class Game: ...\n")
    return TurnsConfig(path="game.py", name=("Game",), kwargs={"levels": 3}, max_turns=3, max_turn_len=9, join="round")


def test_what_answers_between_turns_is_taken_from_the_run_unless_it_is_given(tmp_path, turns):
    checkpoint = save_run(tmp_path, turns=turns, rollout=RolloutConfig())
    cfg, line = completed(checkpoint)
    assert cfg.turns == turns
    told = "--turns.path game.py --turns.name Game --turns.kwargs '{\"levels\": 3}' --turns.max-turns 3"
    assert line.startswith(f"taken from the run of {checkpoint}: ") and told in line
    pasted, _ = completed("", *shlex.split(line.partition(": ")[2]))
    assert pasted.turns == turns
    assert completed(checkpoint, "--turns.max_turns=5", "--turns.join", "step")[0].turns == replace(
        turns, max_turns=5, join="step"
    )
    for path in ("None", "other.py"):  # the options of another file are no use
        cfg, line = completed(checkpoint, "--turns.path", path)
        assert cfg.turns == TurnsConfig(path=None if path == "None" else path) and "--turns" not in line
    cfg, line = completed(checkpoint, "--score-only", samples=False)
    assert cfg.turns == TurnsConfig() and "--turns" not in line
    with pytest.raises(UserError, match="a turn must end as the model's chat template ends it"):
        completed(checkpoint, "--rollout.stop", "###")


def test_a_file_of_environments_that_changed_is_told_and_one_that_is_gone_is_refused(tmp_path, turns, mine):
    checkpoint = save_run(tmp_path, turns=turns, rollout=RolloutConfig(), reward=mine)
    assert "changed since" not in completed(checkpoint)[1]
    (tmp_path / "game.py").write_text("class Game: pass\n")
    assert f"the run of {checkpoint}, whose turns file has changed since: " in completed(checkpoint)[1]
    assert "changed since" not in completed(checkpoint, "--turns.path", "game.py", "--turns.name", "Game")[1]
    (tmp_path / "reward.py").write_text("")
    assert ", whose turns file has changed since, whose reward file has changed since: " in completed(checkpoint)[1]
    (tmp_path / "game.py").unlink()
    with pytest.raises(UserError, match=r"the file of the run's turns is not there; .*found no game.py.*None: single"):
        completed(checkpoint)
    completed(checkpoint, "--turns.path", "None")


def test_a_secret_of_the_environments_is_asked_for(tmp_path, turns):
    secret = replace(turns, kwargs={"index": {"api_key": "canary-2f9c41d7"}})
    checkpoint = save_run(tmp_path, turns=secret, rollout=RolloutConfig())
    with pytest.raises(UserError, match=r"the run's --turns.kwargs were given a secret, .*; give --turns.kwargs"):
        completed(checkpoint)
    cfg, _ = completed(checkpoint, "--turns.kwargs", '{"levels": 4}')
    assert cfg.turns == replace(turns, kwargs={"levels": 4})
