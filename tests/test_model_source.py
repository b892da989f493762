"""--model.path of a training run may be a run or a checkpoint, for its weights alone; the KL's model another one."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from lib.dist import SINGLE, init_distributed
from lib.errors import DamagedCheckpoint, UserError
from lib.launch.checks import check_critic, describe, find_models
from lib.launch.resume import Resume, find_resume
from lib.model.critic_config import CriticConfig
from lib.model.fsdp import iter_full_tensors, load_critic, load_policy
from lib.model.networks import ModelConfig
from lib.storage.model_folder import check_reference
from tests.checkpoint_worker import config, make_prompts, train

LENGTHS = ("--data.max-prompt-len", 16, "--rollout.max-response-len", 16)
NO_KL = ("--kl-reward.coef", 0, "--kl-reward.target", "None")


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """A run of 2 steps with both checkpoints, and its weights. Not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ("--run-dir", folder, "--num-steps", 2, "--checkpoint.every", 1)
    return folder, train(config(model, *words), init_distributed())["weights"]


def options(path, *words):
    return config(path, "--run-dir", "nowhere", "--num-steps", 9, *LENGTHS, *words)


def weights(model):
    return {name: full.clone() for name, full in iter_full_tensors(model, torch.float32)}


def said(cfg, files):
    prompts = make_prompts()
    return describe(cfg, SINGLE, files, prompts, prompts, num_steps=9)


def test_the_run_in_words_tells_training_prompts_from_validation_prompts(model):
    cfg = options(model, *NO_KL)
    train_set = replace(make_prompts(), num_filtered=2, num_truncated=3, longest=14)
    words = describe(cfg, SINGLE, find_models(cfg, Resume(), SINGLE), train_set, make_prompts(range(7)), num_steps=9)
    assert (
        "\ndata         10 training prompts, 2 dropped as too long, 3 shortened, longest 14 tokens; "
        "7 validation prompts\n"
    ) in words
    assert "run          9 steps = 9 optimizer steps; 36 prompts = 3.6 epochs of 10\n" in words


@pytest.mark.parametrize("part", ["", "global_step_2", "global_step_2/actor", "global_step_2/actor/huggingface"])
def test_policy_and_critic_begin_with_a_checkpoints_weights_alone(run, part):
    cfg, world = options(run[0] / part, *NO_KL), init_distributed()
    files = find_models(cfg, Resume(), SINGLE)
    policy = load_policy(cfg.model, str(files.folder), cfg.fsdp, world)
    found = weights(policy)
    assert found.keys() == run[1].keys() and all(torch.equal(found[name], run[1][name]) for name in found)
    assert f"model        the weights of {run[0]}/global_step_2 (0.1 M parameters)" in said(cfg, files)
    critic_files = check_critic(cfg, CriticConfig(), files, Resume(), SINGLE)
    critic = weights(load_critic(ModelConfig(), str(critic_files.folder), cfg.fsdp, world))
    assert not critic.pop("score.weight").any() and not critic.pop("score.bias").any()
    assert all(torch.equal(critic[name], run[1][name]) for name in critic) and len(critic) >= len(found) - 1


def test_a_damaged_checkpoint_is_passed_over_told_or_refused(model, run, tmp_path):
    shutil.copytree(run[0], tmp_path / "run")
    [shard] = (tmp_path / "run" / "global_step_2" / "actor" / "model").iterdir()
    shard.write_bytes(shard.read_bytes()[:-1])
    cfg = options(tmp_path / "run", *NO_KL)
    text = said(cfg, find_models(cfg, Resume(), SINGLE))
    assert "global_step_1 (" in text and "warning: skipped: a file is truncated" in text
    data = bytearray((run[0] / "global_step_2" / shard.relative_to(tmp_path / "run" / "global_step_2")).read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=r"a file was changed after it was written; .*global_step_2"):
        find_models(cfg, Resume(), SINGLE)
    for step in (1, 2):
        shutil.rmtree(tmp_path / "run" / f"global_step_{step}")
    with pytest.raises(UserError, match=r"the run has no checkpoint; --model\.path "):
        find_models(cfg, Resume(), SINGLE)


# ---- The reference ----


def test_the_reference_is_the_models_own_or_another_one_and_is_told(model, run):
    cfg = options(run[0])
    files = find_models(cfg, Resume(), SINGLE)
    assert files.reference.folder == files.folder == run[0] / "global_step_2" / "actor" / "huggingface"
    assert f"the reference is the weights of {run[0]}/global_step_2\n" in f"{said(cfg, files)}\n"
    cfg = options(run[0], "--model.reference-path", model)
    files = find_models(cfg, Resume(), SINGLE)
    assert files.reference.folder == model and files.num_frozen_parameters == files.num_parameters
    assert f"; the reference is {model}" in said(cfg, files)
    cfg = options(model, "--model.reference-path", run[0], *NO_KL)
    files = find_models(cfg, Resume(), SINGLE)
    assert files.reference is None and files.num_frozen_parameters == 0
    assert "; none: --model.reference-path without a KL does nothing" in said(cfg, files)


def test_a_reference_of_another_vocabulary_is_refused(model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    cfg = options(model, "--model.reference-path", other)
    assert find_models(cfg, Resume(), SINGLE).reference.folder == other
    tokens = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokens.replace('"<|pad|>"', '"<|other|>"'))
    with pytest.raises(UserError, match=r"the reference reads other tokens .*; --model.reference-path .*'<\|other\|>'"):
        find_models(cfg, Resume(), SINGLE)
    files = find_models(options(model, *NO_KL), Resume(), SINGLE)
    with pytest.raises(UserError, match=r"found vocab_size=200, expected at least the policy's 201"):
        check_reference(replace(files, config=files.config | {"vocab_size": 201}), files)
    check_reference(files, replace(files, config=files.config | {"vocab_size": 201}))  # padded to more rows
    with pytest.raises(UserError, match=r"no such model folder; --model\.reference-path "):
        find_models(options(model, "--model.reference-path", tmp_path / "nowhere"), Resume(), SINGLE)
    with pytest.raises(UserError, match=r"no KL holds a critic; --critic\.model\.reference-path x"):
        CriticConfig(model=ModelConfig(reference_path="x"))


def test_a_resume_finds_the_reference_that_the_run_began_with(model, run, tmp_path):
    """Meanwhile the run that it lies in has gone on."""
    other, mine = tmp_path / "other", tmp_path / "mine"
    shutil.copytree(run[0], other)
    shutil.rmtree(other / "global_step_2")
    cfg = config(other, "--run-dir", mine, "--num-steps", 1, *LENGTHS)
    files = find_models(cfg, Resume(), SINGLE)
    began_from = files.began_from
    assert began_from.keys() == {"model", "reference"}
    train(cfg, init_distributed(), files=files)
    assert json.loads((mine / "global_step_1" / "trainer.json").read_text())["began_from"] == began_from
    shutil.copytree(run[0] / "global_step_2", other / "global_step_2")
    again = config(other, "--run-dir", mine, "--num-steps", 2, *LENGTHS)
    assert find_models(again, find_resume(again, SINGLE), SINGLE).began_from == began_from
    words = ("--run-dir", tmp_path / "new", "--checkpoint.resume", mine / "global_step_1", *LENGTHS)
    branch = config(other, *words)
    assert find_models(branch, find_resume(branch, SINGLE), SINGLE).began_from == began_from
    branch = config(other / "global_step_2", *words)
    assert "global_step_2" in find_models(branch, find_resume(branch, SINGLE), SINGLE).began_from["reference"]
    shutil.rmtree(other / "global_step_1")
    with pytest.raises(
        UserError, match=r"the reference that the run began with is gone; --model.path; found no .*step_1"
    ):
        find_models(again, find_resume(again, SINGLE), SINGLE)
