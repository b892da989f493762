"""The whole command with adapters: trained, continued, evaluated, merged, begun from, and refused in one line."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from lib.dist import SINGLE
from lib.errors import UserError
from lib.launch.resume import Resume
from lib.model.lora import LoRAConfig
from lib.storage.model_folder import check_model_files
from lib.storage.model_source import verify_actor
from lib.storage.weights import hash_tensors
from lib.tracking.run_folder import read_metrics
from tests.merge_checkpoints import merged, weights
from tests.prefork import prefork
from tests.ranks import LIMIT_S, ROOT
from tests.tiny import make_model, make_questions, make_tokenizer

FILE = "model/model.safetensors"
LORA = ("--lora.rank", "4", "--lora.alpha", "8")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a model, its tokenizer, training and validation questions. The model's file holds its tied head
    too, with which nothing computes."""
    folder = tmp_path_factory.mktemp("lora_runs")
    make_tokenizer(make_model(folder / "model"))
    tensors = weights(folder / "model")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / FILE)
    make_questions(folder / "train.parquet", count=40, start=0)
    make_questions(folder / "val.parquet", count=7, start=100)
    return folder


def words(folder, run, *more, script="train_grpo.py", num_steps=3, model="model"):
    return (
        script, "--model.path", str(folder / model), "--data.train-files", str(folder / "train.parquet"),
        "--data.val-files", str(folder / "val.parquet"), "--data.max-prompt-len", "24", "--rollout.max-response-len",
        "12", "--rollout.n", "4", "--rollout.max-num-seqs", "32", "--prompts-per-step", "4", "--mini-batch-size", "16",
        "--max-tokens-per-gpu", "80", "--num-steps", str(num_steps), "--eval.every", "2", "--optim.lr", "1e-2",
        "--reward.path", str(ROOT / "recipes/hash_reward.py"), "--reward.num-workers", "1", "--checkpoint.every", "2",
        "--run-dir", str(folder / run), *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(files):
    """A run of three steps on 2 ranks, and what it said."""
    done = prefork(2, *words(files, "run", *LORA, "--kl-loss-coef", "0.1"), vllm=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return files / "run", done.stdout


def refusal(num_ranks, *command):
    """The one line of a launch that ends with 2 before a model is loaded."""
    done = prefork(num_ranks, *command, vllm=True)
    assert set(done.codes) == {2}, done.stdout[-2000:] + done.stderr[-2000:]
    assert "the policy is loaded" not in done.stdout and "building the engine" not in done.stdout
    [line] = {line for line in done.stderr.splitlines() if line.startswith("error[2]")}
    return line


def test_a_run_trains_adapters_alone_beside_a_reference_that_is_the_base(run, files):
    folder, said = run
    assert "adapter      LoRA of rank 4 on 14 matrices, alpha 8, init kaiming: 0.0" in said
    assert "the reference is" in said and "without the adapter" in said
    first, *later = (row for row in read_metrics(folder) if row["step"])
    # Before the first update the policy is the reference.
    assert first["actor/kl_loss"] == 0 < later[-1]["actor/kl_loss"]
    assert all(row["training/rollout_log_probs_diff/mean"] < 1e-5 for row in (first, *later))
    saved = json.loads((folder / "global_step_3" / "actor" / "huggingface" / "adapter.json").read_text())
    assert (saved["base"], saved["scale"], saved["dtype"]) == (str(files / "model"), 2.0, "float32")
    assert {*saved["tensors"]} == {*weights(files / "model")} - {"lm_head.weight"}
    held = weights(folder / "global_step_3" / "actor" / "model")
    assert len(held) == 28 and all("lora_" in name for name in held)


def test_a_killed_run_goes_on_to_the_bit_also_on_another_number_of_ranks(run, files):
    folder, _ = run
    expected = weights(merged(folder / "global_step_3" / "actor", files / "straight"))
    for name, num_ranks in (("two", 2), ("one", 1)):
        branch = ("--checkpoint.resume", str(folder / "global_step_2"), "--kl-loss-coef", "0.1")
        done = prefork(num_ranks, *words(files, name, *LORA, *branch), vllm=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        found = weights(merged(files / name / "global_step_3" / "actor", files / f"merged {name}"))
        for key, tensor in expected.items():
            same = torch.equal(tensor, found[key]) if num_ranks == 2 else torch.allclose(tensor, found[key], atol=1e-3)
            assert same, (name, key, float((tensor - found[key]).abs().max()))
    base = weights(files / "model")
    assert any(not torch.equal(tensor, base[key]) for key, tensor in expected.items())


def test_a_run_is_evaluated_as_its_merged_model_is_and_training_goes_on_from_it(run, files):
    folder, _ = run
    target = merged(folder / "global_step_3" / "actor", files / "for eval")
    alone = merged(folder / "global_step_3" / "actor", files / "alone", adapter=True)
    answers, added = {}, ("--lora.path", str(alone))
    for name, model, more in (("run", folder, ()), ("merged", target, ()), ("added", files / "model", added)):
        command = (
            "eval.py", "--model.path", str(model), *more, "--data.files", str(files / "val.parquet"), "--output",
            str(files / f"{name}.parquet"), "--data.max-prompt-len", "24", "--rollout.max-response-len", "12",
            "--rollout.temperature", "0", "--reward.path", str(ROOT / "recipes/hash_reward.py"),
        )  # fmt: skip
        done = prefork(1, *command, vllm=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        answers[name] = pq.read_table(files / f"{name}.parquet")["responses"].to_pylist()
    assert answers["run"] == answers["merged"] == answers["added"]
    done = prefork(1, *words(files, "full", num_steps=1, model="run"), vllm=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "(0.1 M parameters)" in done.stdout and "adapter " not in done.stdout


def test_training_goes_on_from_an_adapter_of_peft_and_is_held_to_the_model_without_it(run, files):
    folder, _ = run
    start = merged(folder / "global_step_3" / "actor", files / "to go on from", adapter=True)
    more = ("--lora.path", str(start), "--kl-loss-coef", "0.1", "--optim.lr", "1e-12")
    done = prefork(2, *words(files, "again", *more, num_steps=1), vllm=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert f"LoRA of rank 4 on 14 matrices, alpha 8, begun at {start}" in done.stdout
    assert "adapters hardly learn at --optim.lr 1e-12" in done.stdout
    [row] = [row for row in read_metrics(files / "again") if row["step"] == 1]
    assert row["actor/kl_loss"] > 0  # the reference is without it
    before, after = (
        weights(merged(run_dir / "actor", files / f"whole {step}"))
        for step, run_dir in ((3, folder / "global_step_3"), (1, files / "again" / "global_step_1"))
    )
    assert all(torch.allclose(before[name], after[name], rtol=0, atol=1e-9) for name in before)
    make_tokenizer(make_model(files / "another", seed=7))
    other = words(files, "d", "--lora.path", str(start), num_steps=4, model="another")
    assert "the adapter was trained on another model" in refusal(2, *other)


def test_adapters_train_with_dynamic_sampling_partial_rollouts_a_curriculum_and_another_reference(files):
    make_tokenizer(make_model(files / "reference", seed=3))
    more = (
        "--filter-groups.enable", "True", "--filter-groups.metric", "score", "--rollout.partial-share", "0.75",
        "--data.curriculum", "True", "--model.reference-path", str(files / "reference"), "--kl-loss-coef", "0.1",
    )  # fmt: skip
    done = prefork(2, *words(files, "mixed", *LORA, *more), vllm=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = [row for row in read_metrics(files / "mixed") if row["step"]]
    assert rows[0]["actor/kl_loss"] > 0 and len(rows) == 3
    assert all(row["training/rollout_log_probs_diff/mean"] < 1e-5 for row in rows[:1])
    assert all("lora_" in name for name in weights(files / "mixed" / "global_step_3" / "actor" / "model"))


def test_ppo_trains_adapters_beside_a_whole_critic(files):
    more = ("--critic.warmup-steps", "1", "--kl-reward.coef", "0.05")
    done = prefork(1, *words(files, "ppo", *LORA, *more, script="train_ppo.py", num_steps=2), vllm=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    step = files / "ppo" / "global_step_2"
    assert len(weights(step / "actor" / "model")) == 28
    assert not any("lora_" in name for name in weights(step / "critic" / "model"))
    assert not (step / "critic" / "huggingface" / "adapter.json").exists()


def test_what_does_not_fit_a_checkpoint_is_told_before_a_model_is_loaded(run, files):
    folder, _ = run
    again = words(files, "run", "--kl-loss-coef", "0.1", num_steps=4)
    for more, expected in (
        (("--lora.rank", "8", "--lora.alpha", "8"), "lora.rank was 4 and is 8"),
        (("--lora.rank", "4", "--lora.alpha", "16"), "lora.alpha was 8.0 and is 16.0"),
        ((*LORA, "--lora.exclude", "q_proj"), "lora.exclude"),
        ((), "lora.rank was 4 and is 0"),
    ):
        assert expected in refusal(1, *again, *more)
    branch = ("--checkpoint.resume", str(folder / "global_step_3"), "--lora.alpha", "8", "--lora.rank")
    scaled = (*branch, "4", "--lora.alpha", "16")
    assert "found alpha / rank 4, expected 2" in refusal(1, *words(files, "b", *scaled, num_steps=4))
    assert "the checkpoint is of another model" in refusal(1, *words(files, "b", *branch, "8", num_steps=4))
    make_tokenizer(make_model(files / "other", seed=7))
    other = words(files, "b", *branch, "4", num_steps=4, model="other")
    assert "the adapter was trained on another model" in refusal(2, *other)
    shutil.copytree(files / "model", files / "untied")  # computes with what the adapter was not trained beside
    settings = json.loads((files / "untied" / "config.json").read_text()) | {"tie_word_embeddings": False}
    (files / "untied" / "config.json").write_text(json.dumps(settings))
    line = refusal(1, *words(files, "b", *branch, "4", num_steps=4, model="untied"))
    assert "the adapter was trained on another model" in line and "lm_head.weight" in line
    beside = merged(folder / "global_step_2" / "actor", files / "beside", adapter=True)
    own = "the checkpoint has an adapter of its own"
    assert own in (line := refusal(1, *words(files, "b", *branch[:2], "--lora.path", str(beside), num_steps=4)))
    assert "say --lora.rank 4 --lora.alpha 8 --lora.targets down_proj gate_proj" in line
    model = check_model_files(str(files / "model"), max_prompt_len=24, max_response_len=12)
    model = replace(model, tensor_hashes=hash_tensors(files / "model", SINGLE))
    began = {"config": {"lora": {"path": os.path.relpath(beside)}}}  # of this very adapter, spelt otherwise
    Resume(path=folder / "global_step_3", trainer=began).check_base(model, LoRAConfig(path=str(beside)))
    assert "has not; no_proj; found q_proj" in refusal(1, *words(files, "c", *LORA, "--lora.targets", "no_proj"))


def test_a_run_whose_base_is_gone_or_another_is_refused_before_an_engine_is_built(run, files):
    folder, _ = run
    actor, base = folder / "global_step_3" / "actor", files / "model"
    assert "actor/huggingface/adapter.json" in verify_actor(actor, SINGLE)
    kept = base.rename(files / "kept")
    try:
        shutil.copytree(kept, base)
        used = {name: tensor for name, tensor in weights(base).items() if name != "lm_head.weight"}
        save_file(used, files / FILE)
        assert verify_actor(actor, SINGLE)  # what nothing computes with may be gone
        shutil.rmtree(base)
        with pytest.raises(UserError, match="the model under an adapter is gone"):
            verify_actor(actor, SINGLE)
        make_tokenizer(make_model(base, seed=7))
        rows = ("--data.files", str(files / "val.parquet"), "--output", str(files / "none.parquet"))
        for command in (words(files, "e", model="run"), ("eval.py", "--model.path", str(folder), *rows)):
            assert "the adapter was trained on another model" in refusal(1, *command)
    finally:
        shutil.rmtree(base, ignore_errors=True)
        kept.rename(base)


def test_overwrite_never_moves_away_what_the_run_begins_with(run, files):
    folder, _ = run
    inside = merged(folder / "global_step_3" / "actor", folder / "adapter", adapter=True)
    moved = "--overwrite moves away what the run begins with; "
    assert f"{moved}--lora.path" in refusal(2, *words(files, "run", "--overwrite", "--lora.path", str(inside)))
    assert f"{moved}--model.path" in refusal(1, *words(files, "run", "--overwrite", *LORA, model="run"))
    other = ("--model.reference-path", str(folder), "--kl-loss-coef", "0.1")
    assert f"{moved}--model.reference-path" in refusal(1, *words(files, "run", "--overwrite", *other))
    above = files / "above" / "global_step_3" / "actor"  # as a run that began with this one saves it
    shutil.copytree(folder / "global_step_3" / "actor", above)
    saved = json.loads((above / "huggingface" / "adapter.json").read_text())
    saved["base"] = str(folder / "global_step_3" / "actor" / "huggingface")
    (above / "huggingface" / "adapter.json").write_text(json.dumps(saved))
    line = refusal(1, *words(files, "run", "--overwrite", model="above/global_step_3/actor"))
    assert f"{moved}--model.path" in line and f"found the model under its adapter, {saved['base']}, in" in line
    assert (folder / "global_step_3").is_dir() and inside.is_dir()
    shutil.rmtree(inside)


def test_force_never_replaces_the_model_under_an_adapter(run, files):
    actor = run[0] / "global_step_3" / "actor"
    before = (files / FILE).read_bytes()
    link = files / "link"
    link.symlink_to(files / "model")
    copy = str(shutil.copytree(files / "model", files / "copy"))
    for target, more in (
        (files / "model", {}), (link, {}), (files / "model", {"adapter": True}), (files / "model", {"base": copy}),
        (files / "copy", {"base": copy}), (files / "model", {"adapter": True, "base": "Qwen/Qwen3-4B"}),
    ):  # fmt: skip
        with pytest.raises(UserError, match="--target-dir would replace the model under the adapter"):
            merged(actor, target, force=True, **more)
    assert (files / FILE).read_bytes() == before
    merged(actor, files / "elsewhere", base=copy)


def test_an_exported_adapter_is_replaced_by_force_alone_and_only_where_nothing_else_lies(run, files):
    folder, _ = run
    earlier, later = (folder / f"global_step_{step}" / "actor" for step in (2, 3))
    target = merged(earlier, files / "exported", adapter=True)
    before = (target / "adapter_model.safetensors").read_bytes()
    with pytest.raises(UserError, match="--target-dir is not empty"):
        merged(later, target, adapter=True)
    merged(later, target, adapter=True, force=True)
    assert (target / "adapter_model.safetensors").read_bytes() != before
    (target / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="by something that is neither a merged model nor an adapter"):
        merged(later, target, adapter=True, force=True)


def test_no_training_script_imports_peft():
    code = "import sys, train_grpo, train_ppo, merge, eval\nassert 'peft' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, timeout=LIMIT_S)
