"""Which options, data and models a run may go on with, what of them is told, and the date of its prompts."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from lib.checkpoints.checkpointer import versions
from lib.config.as_json import to_json
from lib.data.prompts import DataConfig, check_data_files
from lib.dist import SINGLE, init_distributed
from lib.errors import UserError
from lib.launch.branch import MAY_DIFFER, flat
from lib.launch.checks import check_input, load_prompts
from lib.launch.resume import find_resume, with_date
from lib.model.critic_config import CriticConfig
from lib.model.networks import ModelConfig
from lib.model.optim import OptimConfig
from lib.storage.checkpoint_folder import hash_files, publish
from lib.storage.model_folder import check_model_files
from lib.tracking.run_folder import read_status
from lib.turns.config import TurnsConfig
from lib.turns.hub import About
from lib.turns.kinds import Kinds
from lib.turns.start import Turns
from tests.checkpoint_worker import REWARD, config, train
from tests.resumed_run import change_status, done, options, run  # noqa: F401 (fixtures)
from tests.tiny import make_model, make_questions
from train_ppo import PPOConfig

# ---- The same config ----


def test_options_that_matter_are_named_field_by_field(model, run):
    words = ("--optim.lr", "3e-2", "--rollout.temperature", "0.5", "--loss", "gspo", "--eval.every", "7")
    with pytest.raises(UserError) as caught:
        find_resume(options(model, run, *words), SINGLE)
    text = str(caught.value)
    assert "the checkpoint's run had other options; " in text and str(run / "global_step_4") in text
    for part in ("optim.lr was 0.01 and is 0.03", "rollout.temperature was 1.0 and is 0.5", "loss.name was "):
        assert part in text
    assert "eval.every" not in text and "num_steps" not in text


def test_an_option_that_the_checkpoint_did_not_know_had_its_default(model, run):
    path = run / "global_step_4"
    trainer = json.loads((path / "trainer.json").read_text())
    del trainer["config"]["data"]["curriculum"], trainer["config"]["overlong"]["mask_truncated"]
    shutil.move(path, run / "earlier")  # the same files, written before there were these options
    (run / "earlier" / "MANIFEST.json").unlink()
    (run / "earlier" / "trainer.json").write_text(json.dumps(trainer))
    names = [file.relative_to(run / "earlier").as_posix() for file in (run / "earlier").rglob("*") if file.is_file()]
    publish(run / "earlier", path, hash_files(run / "earlier", names), inventory={})
    assert find_resume(options(model, run), SINGLE).step == 4
    with pytest.raises(UserError, match=r"options; .*; data.curriculum was false and is true; give the same"):
        find_resume(options(model, run, "--data.curriculum", "True"), SINGLE)


def test_options_that_may_differ_are_options():
    from fnmatch import fnmatch

    from train_grpo import GRPOConfig
    from train_ppo import PPOConfig

    names = {*flat(to_json(GRPOConfig(data=DataConfig(chat_template_kwargs={"x": 1})))), *flat(to_json(PPOConfig()))}
    assert not [free for free in MAY_DIFFER if not any(fnmatch(name, free) for name in names)]
    free = {name for name in names if any(fnmatch(name, pattern) for pattern in MAY_DIFFER)}
    assert not {name for name in free if name.startswith(("optim", "loss", "advantage", "correction", "kl", "filter"))}
    assert {"critic.fsdp.param_offload", "critic.max_tokens_per_gpu", "model.gradient_checkpointing"} <= free
    assert not {"seed", "model.path", "model.dtype", "rollout.n", "prompts_per_step", "data.max_prompt_len"} & free


def test_other_data_is_refused_by_what_is_in_it(model, run, monkeypatch):
    from tests import checkpoint_worker

    monkeypatch.setattr(checkpoint_worker, "NUM_PROMPTS", 11)
    with pytest.raises(UserError, match=r"the prompts are not those of the checkpoint: another rows"):
        train(options(model, run), init_distributed())


def test_a_checkpoint_of_another_model_is_refused_before_it_is_loaded(model, tmp_path):
    """The path is the same, but another model lies there now."""
    world, folder = init_distributed(), tmp_path / "model"
    shutil.copytree(model, folder)
    words = ("--run-dir", tmp_path / "run", "--num-steps")
    train(config(folder, *words, 1), world)
    make_model(folder, tied=False)
    with pytest.raises(UserError, match=r"the checkpoint is of another model; .*; it lacks lm_head\.weight; give"):
        train(config(folder, *words, 2), world)


def test_the_whole_command_says_so_before_a_model_is_loaded(model, run, tmp_path):
    make_questions(tmp_path / "train.parquet", count=4, start=0)
    lens = ("--data.max-prompt-len", 16, "--rollout.max-response-len", 16)
    cfg = options(model, run, *lens, "--data.train-files", tmp_path / "train.parquet", "--seed", 5)
    with pytest.raises(UserError, match="seed was 0 and is 5"):
        check_input(cfg, SINGLE)


# ---- What --overwrite moves ----


def test_overwrite_moves_what_the_run_does_not_begin_with(model, run, tmp_path, monkeypatch):
    """Within the run's folder: no path, a hub id, what is no path, and one that is refused later."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.chdir(run)
    for words in (
        (), ("--model.reference-path", "Qwen/Qwen3-0.6B"), ("--model.reference-path", tmp_path / "loop"),
        ("--model.reference-path", "~no-such-user/model"),
        ("--reward.kwargs", '{"model": {"path": ["a"]}, "judge_model": {"path": "global_step_4"}}'),
    ):  # fmt: skip
        assert find_resume(options(model, ".", "--overwrite", *words), SINGLE).step == 0
    assert find_resume(PPOConfig(run_dir=".", overwrite=True), SINGLE).step == 0  # whose critic has no path


def test_overwrite_does_not_move_what_the_run_begins_with(model, run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    critic = CriticConfig(model=ModelConfig(path=str(run / "global_step_4" / "critic")))
    (run / "global_step_4" / "critic").mkdir()
    for option, cfg in (
        ("--critic.model.path", PPOConfig(run_dir=str(run), overwrite=True, critic=critic)),
        ("--model.reference-path", options(model, run, "--overwrite", "--model.reference-path", tmp_path / "link")),
    ):
        with pytest.raises(UserError, match=f"--overwrite moves away what the run begins with; {option} .*found it in"):
            find_resume(cfg, SINGLE)


# ---- The date of its prompts ----


@pytest.fixture
def clock(model, run):
    """A model folder whose template prints the time, and options to read 4 questions with it."""
    folder = run.parent / "clock"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%Y-%m-%dT%H:%M:%S') }}")
    make_questions(folder / "train.parquet", count=4, start=0)
    return folder, ("--data.train-files", folder / "train.parquet")


def first_prompt(cfg, folder, resume):
    files = check_model_files(str(folder), max_prompt_len=16, max_response_len=16)
    tokenizer, _, _, train_set, _ = load_prompts(cfg, check_data_files(cfg.data), files, resume, None, SINGLE)
    return tokenizer.decode(train_set.all_samples()[0].prompt_ids)


def test_a_run_keeps_the_date_of_its_prompts(model, run, clock, tmp_path):
    folder, words = clock
    began = read_status(run)["date"]
    assert json.loads((run / "global_step_4" / "trainer.json").read_text())["date"] == began
    for more in ((), ("--run-dir", tmp_path / "new", "--checkpoint.resume", run / "global_step_2")):
        cfg = options(model, run, *words, *more)
        resume = with_date(find_resume(cfg, SINGLE), cfg, SINGLE)
        assert resume.step and resume.date == began
        assert first_prompt(cfg, folder, resume) == began


def test_a_run_without_a_checkpoint_keeps_the_date_of_its_prompts(run, clock, tmp_path):
    folder, words = clock
    for step in (2, 4):
        shutil.rmtree(run / f"global_step_{step}")
    change_status(run, state="stopped", step=0, date="2024-02-03T04:05:06")
    lens = ("--data.max-prompt-len", 64, "--rollout.max-response-len", 16)
    cfg = options(folder, run, *words, *lens)
    *_, resume = check_input(cfg, SINGLE)
    assert resume.in_place and first_prompt(cfg, folder, resume) == "2024-02-03T04:05:06"
    *_, other = check_input(options(folder, tmp_path / "other", *words, *lens), SINGLE)
    assert other.date > "2026"  # now


def test_the_date_of_an_older_checkpoint_can_be_given_to_the_template(model, run):
    """Of one that did not keep it: the prompts themselves are compared."""
    variables = json.dumps({"date_string": "03 Feb 2024"})
    assert find_resume(options(model, run, "--data.chat-template-kwargs", variables), SINGLE).step == 4
    assert find_resume(options(model, run, "--data.control-tokens", "split"), SINGLE).step == 4


# ---- What is told ----


def test_a_resume_is_told_in_words(model, run):
    cfg = options(model, run)
    resume = find_resume(cfg, SINGLE)
    cfg = replace(cfg, optim=replace(cfg.optim, warmup_steps=10))
    prompts, torch_there = resume.trainer["prompts"], "2.0.1+cpu"
    assert (prompts["epoch"], prompts["place"]) == (1, 6)  # 4 steps of 4 of the 10 prompts
    changed = replace(resume, trainer={**resume.trainer, "versions": {**versions(), "torch": torch_there}})
    line = f"continuing from {run}/global_step_4: step 5 of 6 is next, learning rate 0.005, prompt 6 of epoch 1"
    assert resume.in_words(cfg, 6, reward=REWARD) == line
    assert changed.in_words(cfg, 6, reward=REWARD) == (
        f"{line}\nwarning: other versions may round otherwise: torch {torch_there} there, {torch.__version__} here"
    )


def test_a_schedule_that_now_ends_elsewhere_is_told_also_of_a_run_from_before_schedules_ended_after_the_last_step(
    model, run
):
    cfg = options(model, run, "--optim.schedule", "cosine")
    resume = find_resume(options(model, run), SINGLE)
    assert "learning rate's schedule" not in resume.in_words(cfg, 4, reward=REWARD)
    assert "the learning rate's schedule now ends at step 7, not 5" in resume.in_words(cfg, 6, reward=REWARD)
    older = replace(resume, trainer={name: value for name, value in resume.trainer.items() if name != "schedule_end"})
    assert "the learning rate's schedule now ends at step 5, not 4" in older.in_words(cfg, 4, reward=REWARD)
    assert "learning rate's schedule" not in older.in_words(options(model, run), 4, reward=REWARD)  # of a constant rate
    ppo = PPOConfig(critic=CriticConfig(optim=OptimConfig(schedule="linear")))
    assert "now ends at step 5, not 4" in older.in_words(ppo, 4, reward=REWARD)


def test_another_reward_file_is_told(model, run):
    cfg = options(model, run)
    resume = find_resume(cfg, SINGLE)
    assert "reward function" not in resume.in_words(cfg, 6, reward=REWARD)
    words = resume.in_words(cfg, 6, reward=REWARD.replace("sha256 ab", "sha256 cd"))
    assert "warning: the reward function's file is another: sha256 ab there, cd here" in words


def test_another_file_of_environments_is_told(model, run):
    def turns(file_hash):
        game = About(instant=True, replayable=True, scores=True, tools=[])
        kinds = Kinds({"Game": game}, file_hash=file_hash)
        return Turns(cfg=TurnsConfig(path="game.py", name=("Game",)), kinds=kinds, format=None, notes=())

    cfg = options(model, run)
    resume = find_resume(cfg, SINGLE)
    resume = replace(resume, trainer={**resume.trainer, "turns": turns("ab").in_words})
    assert "environments' file" not in resume.in_words(cfg, 6, reward=REWARD, turns=turns("ab"))
    words = resume.in_words(cfg, 6, reward=REWARD, turns=turns("cd"))
    assert "warning: the environments' file is another: sha256 ab there, cd here" in words
