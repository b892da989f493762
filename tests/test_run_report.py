"""RUN/report.html and the page of several runs: what is on them, that it is small, and that it costs no run."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lib.config.as_json import defaults_of, to_json
from lib.dist import SINGLE
from lib.errors import UserError
from lib.evaluation.compare import CompareConfig, compare_runs
from lib.model.batching import make_batch
from lib.rollouts.shown_samples import (
    HEAD,
    TAIL,
    first_prompts,
    keep_log_probs_of_shown,
    token_texts,
    training_rows,
    validation_rows,
)
from lib.tracking.report import STEPS_KEPT, compare_page, evenly, launch_command, options_that_differ
from lib.tracking.run import Run, TrackingConfig
from lib.tracking.run_folder import step_files
from lib.types import Score
from tests.test_pages import EVIL, check_markup
from tests.tiny import make_rollouts
from train_grpo import GRPOConfig

ROOT = Path(__file__).parents[1]


def row(kind="validation", uid=0, *, texts=("a", "b"), score=1.0, **more):
    return {
        "kind": kind, "uid": uid, "index": 0, "data_source": "s", "temperature": 0.0, "prompt": "question",
        "ground_truth": "7", "score": score, "error": None, "finish_reason": "stop", "num_tokens": len(texts),
        "texts": list(texts), "left_out": None, "log_probs": [-0.25] * len(texts), "advantages": None, **more,
    }  # fmt: skip


def step_metrics(step):
    return {
        "critic/score/mean": step / 100, "response_length/mean": 9.0, "actor/entropy": math.nan if step == 2 else 0.5,
        "actor/kl_loss": 0.01, "training/rollout_log_probs_diff/mean": 1e-7, "perf/throughput": 1200.0,
        "timing_s/step": 3.0, "timing_s/gen": 2.0, "timing_s/update_actor": 0.5,
    }  # fmt: skip


def write_run(folder, *, num_steps=3, config=None, samples=lambda step: [row()], metrics=step_metrics, **options):
    """A run's life with a validation every step; its page."""
    cfg = GRPOConfig()
    with Run(folder, TrackingConfig(), SINGLE, config=to_json(cfg) | (config or {}), num_steps=num_steps,
             defaults=defaults_of(cfg), **options) as run:  # fmt: skip
        for step in range(num_steps + 1):
            run.save_tokens(step, samples(step))
            core = {"val-core/s/acc/mean@1": step / 4, "val-aux/s/repetition/mean@1": 0.125}
            run.log(step, core | (metrics(step) if step else {}))
            assert (folder / "report.html").exists()
        run.finish()
    return (folder / "report.html").read_text()


def test_the_page_shows_the_curves_the_samples_the_command_and_what_was_set(tmp_path):
    training = row("training", 5, advantages=[0.5, None], log_probs=[-0.1, -5.0])
    page = write_run(tmp_path / "my-run", config={"seed": 7}, samples=lambda step: [row(), training])
    found = check_markup(page)
    for title in ("Score by source", "Repetition", "Reward", "Response length", "Entropy", "KL to the reference",
                  "Mismatch of engine and trainer", "Throughput", "Step time by phase"):  # fmt: skip
        assert title in found.text, title
    assert "Run my-run" in found.text and "finished, step 3" in found.text
    assert launch_command().split()[0] in found.text
    assert 'data-name="critic/score/mean" data-steps="1,2,3" data-values="0.01,0.02,0.03"' in page
    assert 'data-name="rest of the step" data-steps="1,2,3" data-values="0.5,0.5,0.5"' in page
    assert "not finite in 1 steps" in page and found.tags.count("tr") == 2
    assert "<td>--seed</td><td>7</td><td>0</td>" in page
    assert [f"step {step}" in found.text for step in range(5)] == [True] * 4 + [False]
    assert 'data-log-probs="-0.1,-5" data-advantages="0.5,none"' in page
    assert '<i>a</i><i class="p3">b</i>' in page  # exp(-5) is below 1/100
    assert "no response" not in found.text


def test_a_strangers_prompt_is_neither_markup_nor_script_on_the_page(tmp_path):
    evil = row(texts=(EVIL, "b"), prompt=EVIL, ground_truth=EVIL, data_source=EVIL, error=EVIL, finish_reason=EVIL)
    name = EVIL.replace("\ud800", "")  # which no file name or option can hold
    config = {"model": {"path": name}, name: name}
    page = write_run(tmp_path / "r", config=config, samples=lambda step: [evil, evil | {"kind": "training"}])
    assert check_markup(page).text.count("<script>alert(1)</script>") > 20
    with Run(tmp_path / "s", TrackingConfig(), SINGLE, config={}, num_steps=1) as run:
        run.log(0, {f"val-core/{name}/acc/mean@1": 1.0, f"val-aux/{name}/garbled/mean@1": 1.0})
    assert check_markup((tmp_path / "s" / "report.html").read_text()).text.count("<script>alert(1)</script>") >= 2


def test_a_page_that_cannot_be_written_is_one_warning_and_the_run_goes_on(tmp_path, capfd):
    with Run(tmp_path / "r", TrackingConfig(), SINGLE, config={}, num_steps=2) as run:
        run.log(0, {"val-core/s/acc/mean@1": 0.5})
        before = (tmp_path / "r" / "report.html").read_text()
        run.save_tokens(1, [{"no": "such row"}])
        run.log(1, {"val-core/s/acc/mean@1": 0.75})
        run.log(2, {"val-core/s/acc/mean@1": 0.8})
        run.finish()
    out = capfd.readouterr().out
    assert out.count("warning: the run's page is not written, and training goes on; report.html; KeyError") == 1
    assert (tmp_path / "r" / "report.html").read_text() == before and "0.500" not in before  # whole, of step 0
    assert json.loads((tmp_path / "r" / "status.json").read_text())["state"] == "finished"
    assert not list((tmp_path / "r").glob(".*"))


def test_without_a_validation_the_page_is_written_with_saved_rollouts_and_with_one_only_then(tmp_path):
    page = tmp_path / "r" / "report.html"
    with Run(tmp_path / "r", TrackingConfig(), SINGLE, config={}, num_steps=9) as run:
        for step, has_rollouts, is_validation, shown in ((1, True, False, 1), (2, False, False, 1), (3, True, False, 3),
                                                         (4, True, True, 4), (5, True, False, 4)):  # fmt: skip
            run.save_tokens(step, [row("training")] * has_rollouts)
            run.log(step, step_metrics(step) | ({"val-core/s/acc/mean@1": 0.5} if is_validation else {}))
            assert f"running, step {shown}" in page.read_text()


def test_a_run_that_failed_has_a_page_that_says_so(tmp_path):
    with pytest.raises(UserError), Run(tmp_path / "r", TrackingConfig(), SINGLE, config={}, num_steps=2) as run:
        run.log(1, step_metrics(1))
        raise UserError("what; where; found; mend")
    text = check_markup((tmp_path / "r" / "report.html").read_text()).text
    assert "failed, step 1" in text and "error[2] what; where; found; mend" in text


def test_the_page_of_a_long_run_stays_small_and_so_does_what_is_kept_of_its_samples(tmp_path):
    long = ["word "] * (HEAD + TAIL)
    rows = [row(uid=uid, texts=long, left_out=[HEAD, 9999], num_tokens=9999 + len(long)) for uid in range(4)]
    rows += [row("training", uid, texts=long, index=index, advantages=[index - 0.5] * len(long))
             for uid in (7, 8) for index in (0, 1)]  # fmt: skip
    folder, cfg = tmp_path / "r", GRPOConfig()
    with Run(folder, TrackingConfig(), SINGLE, config=to_json(cfg), num_steps=1) as run:
        for step in range(100):
            run.save_tokens(step, rows)
        names = sorted(step_metrics(1))
        lines = [{"step": step} | {name: math.sin(step * place) for place, name in enumerate(names)} for step in
                 range(1, 20_001)]  # fmt: skip
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        run.log(20_001, {"val-core/s/acc/mean@1": 0.5})
    page = (folder / "report.html").read_text()
    assert len(page) < 600_000 and "a point is the mean of up to 100 steps" in page
    assert page.count('class="tokens"') == (4 * 2 + 4) * 6 and "... 9999 tokens left out ..." in page
    steps = [step for step, _ in step_files(folder / "tokens", "jsonl")]
    assert len(steps) <= STEPS_KEPT and steps[0] == 0 and steps[-1] == 99
    assert max(b - a for a, b in pairwise(steps)) <= 8


def test_neither_kind_of_samples_crowds_out_the_other(tmp_path):
    with Run(tmp_path / "r", TrackingConfig(), SINGLE, config={}, num_steps=1) as run:
        for step in range(300):
            run.save_tokens(step, [row("training" if step % 2 else "validation", texts=[f"said{step}."])])
        run.log(300, {"val-core/s/acc/mean@1": 0.5})
    steps = [step for step, _ in step_files(tmp_path / "r" / "tokens", "jsonl")]
    assert len(steps) <= STEPS_KEPT and {0, 1, 299, 298} <= set(steps)
    said = sorted(map(int, re.findall(r"said(\d+)\.", (tmp_path / "r" / "report.html").read_text())))
    for kind in (0, 1):
        found = [step for step in said if step % 2 == kind]
        assert len(found) == 6 and (found[0], found[-1]) == (kind, 298 + kind)
        assert max(b - a for a, b in pairwise(found)) < 85  # 60 where none is thinned out


def test_evenly_keeps_both_ends():
    assert evenly([], 6) == [] and evenly([3, 5], 6) == [3, 5]
    assert evenly(list(range(0, 101, 10)), 6) == [0, 20, 40, 60, 80, 100]
    assert evenly([0, 1, 2, 3, 4, 5, 50, 100], 3) == [0, 50, 100]  # by their distance, not by their number


def test_what_a_run_goes_on_after_moves_its_later_tokens_aside(tmp_path):
    write_run(tmp_path / "r", num_steps=3)
    Run(tmp_path / "r", TrackingConfig(), SINGLE, config={}, num_steps=4, last_row=1).restore()
    assert [step for step, _ in step_files(tmp_path / "r" / "tokens", "jsonl")] == [0, 1]


def test_only_options_that_differ_are_listed():
    ours = {"loss": {"name": "A", "clip": 0.2}, "files": ["a", "b"], "same": 1, "kwargs": {}}
    theirs = {"loss": {"name": "B"}, "files": [], "same": 1, "kwargs": {}}
    assert options_that_differ([ours, theirs]) == {
        "--loss.name": ["A", "B"], "--loss.clip": ["0.2", "-"], "--files": ["a b", ""],
    }  # fmt: skip


def test_the_command_is_what_was_typed_without_secrets(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "s3cret-canary")
    code = "from lib.tracking.report import launch_command; print(launch_command())"
    words = ["--reward.kwargs", '{"api_key": "other-canary", "n": 1}', "--x", "it's s3cret-canary"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True)
    assert "canary" not in done.stdout and "--reward.kwargs" in done.stdout and "[MY_API_KEY]" in done.stdout
    assert '"n": 1' in done.stdout


# ---- Several runs ----


def test_runs_lie_over_one_another_with_names_that_tell_them_apart(tmp_path):
    for name, seed in (("x/run", 0), ("y/run", 1)):
        write_run(tmp_path / name, config={"seed": seed}, samples=lambda step, seed=seed: [row(texts=[f"say{seed}"])])
    folders = [tmp_path / "x/run", tmp_path / "y/run"]
    page = compare_page(folders)
    found = check_markup(page)
    for folder in folders:
        assert f'data-name="{folder}" data-steps="1,2,3" data-values="0.01,0.02,0.03"' in page
    assert f"equal to {folders[0]}" in page and "<td>--seed</td><td>0</td><td>1</td>" in page
    assert found.tags.count("tr") == 2 + 2 and "say0" in found.text and "say1" in found.text
    other = write_run(tmp_path / "z") and compare_page([folders[0], tmp_path / "z"])
    assert 'data-name="run"' in other and 'data-name="z"' in other


def test_eval_compare_writes_one_page_and_refuses_what_is_no_run(tmp_path, capfd, monkeypatch):
    for name in ("a", "b"):
        write_run(tmp_path / name)
    done = subprocess.run([sys.executable, str(ROOT / "eval.py"), "--compare", "a", "b"], cwd=tmp_path,
                          capture_output=True, text=True)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, f"written: {tmp_path}/compare.html\n", "")
    assert check_markup((tmp_path / "compare.html").read_text()).tags.count("figure") > 8
    monkeypatch.chdir(tmp_path)
    for runs, output, text in ((("a", "nix"), "c.html", "not a run; --compare nix"), (("a",), "c.html", "found 1"),
                               (("a", "a"), "c.html", "name each once"), (("a", "b"), "a.parquet", "expected .html"),
                               (("a", "b"), "a/config.json/c.html", "cannot write the page")):  # fmt: skip
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            compare_runs(CompareConfig(compare=runs, output=output))
        err = capfd.readouterr().err
        assert ended.value.code == 2 and err.startswith("error[2]") and text in err and err.count("\n") == 1


# ---- The samples ----


@pytest.fixture(scope="module")
def tokenizer():
    """A token per byte, all 256 of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_the_texts_of_tokens_are_the_response(tokenizer):
    for text in ("plain text", "ü字\U0001f600 end", "\U0001f600", ""):
        ids = tokenizer.encode(text)
        texts = token_texts(tokenizer, ids)
        assert len(texts) == len(ids) and "".join(texts) == tokenizer.decode(ids) == text
    assert token_texts(tokenizer, tokenizer.encode("ü")) == ["", "ü"]
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581b": 1, "c": 2})))
    words.backend_tokenizer.decoder = decoders.Metaspace()
    assert words.decode([1]) == "b"  # the space at its start is gone
    assert token_texts(words, [0, 1, 2, 0]) == ["a", " b", "c", " a"]
    broken = tokenizer.encode("\U0001f600")[:2] + tokenizer.encode("a")
    assert "".join(token_texts(tokenizer, broken)) == tokenizer.decode(broken)


def test_the_first_prompts_are_of_as_many_sources_as_can_be():
    prompts = [(uid, "a" if uid < 5 else "b") for uid in range(8)]
    assert first_prompts(prompts, 4) == {0, 1, 5, 6} and first_prompts(prompts[::-1] * 2, 1) == {0}
    assert first_prompts(prompts[:2], 4) == {0, 1}


def test_the_worst_and_the_best_response_are_kept_with_their_tokens_numbers(tokenizer):
    rollouts = make_rollouts(num_groups=3, n=4, max_len=9)
    batch = make_batch(rollouts[::-1], SINGLE, mini_batch_size=12)
    noise = torch.rand(batch.response_mask.shape, generator=torch.Generator().manual_seed(1))
    batch = batch.with_(advantages=noise * batch.response_mask)
    rows = training_rows(rollouts, batch, tokenizer, SINGLE)
    for uid in (0, 1):
        group = [r for r in rollouts if r.sample.uid == uid and r.score.score is not None]
        ends = sorted({min(group, key=lambda r: r.score.score).index, max(group, key=lambda r: r.score.score).index})
        assert [found["index"] for found in rows if found["uid"] == uid] == ends
    assert {found["uid"] for found in rows} == {0, 1} and len(rows) == 4
    for found in rows:
        rollout = next(r for r in rollouts if (r.sample.uid, r.index) == (found["uid"], found["index"]))
        at = next(
            i for i in range(len(batch)) if (batch.uids[i], batch.indices[i]) == (rollout.sample.uid, rollout.index)
        )
        count = len(rollout.response_ids)
        assert found["texts"] == token_texts(tokenizer, rollout.response_ids) and found["num_tokens"] == count
        assert found["log_probs"] == pytest.approx(rollout.rollout_log_probs, abs=1e-4)
        assert found["advantages"] == pytest.approx(batch.advantages[at, :count].tolist(), abs=1e-4)


def test_of_a_long_response_both_ends_are_kept_and_the_rest_is_counted(tokenizer):
    ids = [2 + place % 90 for place in range(HEAD + TAIL + 50)]
    rollout = replace(
        make_rollouts(num_groups=1, n=1)[0], response_ids=ids, rollout_log_probs=[-0.001 * i for i in range(len(ids))]
    )
    [found] = validation_rows([rollout], {0}, tokenizer, temperature=0.0)
    assert found["left_out"] == [HEAD, 50] and len(found["texts"]) == len(found["log_probs"]) == HEAD + TAIL
    assert found["log_probs"][HEAD] == pytest.approx(-0.001 * (HEAD + 50)) and found["advantages"] is None
    assert validation_rows([rollout], {1}, tokenizer, temperature=0.0) == []
    kept, dropped = keep_log_probs_of_shown([rollout, replace(rollout, index=1)], {0})
    assert kept is rollout and dropped.rollout_log_probs is None and dropped.response_ids == ids


def test_no_secret_reaches_the_page_token_by_token(tokenizer, tmp_path, monkeypatch):
    canary = "canary-2f9c41d7"
    monkeypatch.setenv("HF_TOKEN", canary)
    rollout = make_rollouts(num_groups=1, n=1)[0]
    sample = replace(rollout.sample, prompt_ids=tokenizer.encode(f"ask {canary}"), ground_truth=[canary])
    error = Score(score=None, error=f"KeyError: {canary}")
    for name, text in (("whole", f"a {canary} b"), ("cut", "x" * (HEAD - 5) + canary + "y" * 200)):
        ids = tokenizer.encode(text)
        rollout = replace(rollout, sample=sample, response_ids=ids, rollout_log_probs=[-1.0] * len(ids), score=error)
        [found] = validation_rows([rollout], {0}, tokenizer, temperature=0.0)
        page = write_run(
            tmp_path / name, samples=lambda step, row=found: [row], config={"url": f"https://{canary}@host"}
        )
        kept = [json.loads(path.read_text()) for path in (tmp_path / name / "tokens").iterdir()]
        assert len(kept) == 4
        for shown in (re.sub(r"<[^>]*>", "", page), *("".join(each["texts"]) for each in kept), json.dumps(kept)):
            assert canary[:4] not in shown and "[HF_TOKEN]" in shown
