"""Rounds of sampling, greedy baselines and groups carried over, with real engines: 1 rank, 2 ranks, tensor parallel 2.

tests/sampling_worker.py runs all cases in one start of the engine; what must come of them is worked out here from the
responses to each prompt sampled alone. Then the whole command: short and empty steps, every phase's options together.
"""

import json
import math
import re
import statistics
import string
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from lib.data.curriculum import WEIGHTS
from lib.dist import SINGLE
from lib.rewards.scoring import RewardConfig, check_error_rate
from lib.rollouts.collector import _with_greedy_score
from lib.tracking.run_folder import read_metrics
from lib.types import Score
from tests import sampling_rewards
from tests.prefork import prefork
from tests.ranks import ROOT
from tests.sampling_worker import CASES, CURRICULUM_CASES, NUM_ALONE
from tests.tiny import make_model, make_questions, make_rollouts, make_tokenizer

LAYOUTS = {"1 rank": (1, 1), "2 ranks": (2, 1), "tensor parallel 2": (2, 2)}
TENSOR_PARALLEL_CASES = ("one rank without signal", "dropped", "surplus kept", "no such metric", "greedy, filtered")
RUN = [
    (layout, name) for layout, (_, size) in LAYOUTS.items() for name in (TENSOR_PARALLEL_CASES if size > 1 else CASES)
]
REPEATABLE = [name for name, case in CASES.items() if case.reward != "that_fails_twice_for_row_7"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{layout: what the worker found}."""
    folder = tmp_path_factory.mktemp("sampling")
    make_model(folder / "model", tied=False)
    make_tokenizer(folder / "model")
    make_questions(folder / "train.parquet", count=120, start=0)
    results = {}
    for layout, (num_ranks, tp_size) in LAYOUTS.items():
        out = folder / f"{num_ranks}{tp_size}.json"
        names = [name for of_layout, name in RUN if of_layout == layout]
        names += CURRICULUM_CASES if tp_size == 1 else ()
        words = ("-m", "tests.sampling_worker", str(folder), str(out), str(tp_size), *names)
        done = prefork(num_ranks, *words, vllm=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        results[layout] = json.loads(out.read_text())
    return results


def rollouts_of(step):
    """The responses of all ranks, in order of uid and index."""
    return sorted((r for of_rank in step["by_rank"] for r in of_rank), key=lambda r: (r["uid"], r["index"]))


def uids_of(step):
    return sorted({r["uid"] for r in rollouts_of(step)})


def reward(name, uid, text):
    """(score, extras, whether the function raised) of a response to the prompt of row `uid`."""
    try:
        value = getattr(sampling_rewards, name)("test", text, str(uid), {"index": uid})
    except ValueError:
        return None, {}, True
    return (value.pop("score"), value, False) if isinstance(value, dict) else (value, {}, False)


def scored_alone(found, name, uid):
    """[(ids, log-probs, score, extras, error, greedy score)] of a prompt's group, each part sampled by itself."""
    case, alone = CASES[name], found["1 rank"]
    group = [
        (ids, log_probs, *reward(case.reward, uid, text)) for ids, text, log_probs in alone["alone"][uid][: case.n]
    ]
    if not case.with_greedy:
        return [(*response, None) for response in group]
    score, _, error = reward(case.reward, uid, alone["greedy"][uid][0][1])
    if score is None:
        return [(ids, log_probs, None, {}, error, None) for ids, log_probs, *_ in group]
    return [(*response, score) for response in group]


def verdict(found, name, uid):
    cfg = CASES[name].filter_groups
    values = [
        score if cfg.metric == "score" else float(extras[cfg.metric])
        for _, _, score, extras, _, _ in scored_alone(found, name, uid)
        if score is not None
    ]
    if len(values) < 2:
        return "failed"
    if statistics.pstdev(values) == 0:
        return "all_right" if values[0] > 0 else "all_wrong"
    return "kept" if cfg.low <= statistics.fmean(values) <= cfg.high else "out_of_band"


def steps_with_reference(found, layout, name):
    """(step, uids drawn for it) of a case, those whose prompts were all sampled alone too."""
    if CASES[name].num_rows is None:
        for before, step in pairwise([{"drawn": 0}, *found[layout]["cases"][name]]):
            if step["drawn"] <= NUM_ALONE and "errors" not in step:
                yield step, range(before["drawn"], step["drawn"])


# ---- Collector.collect ----


@pytest.mark.parametrize("layout", ["1 rank", "2 ranks"])
@pytest.mark.parametrize("name", REPEATABLE)
def test_responses_and_scores_are_those_of_the_prompt_alone(found, layout, name):
    for step, _ in steps_with_reference(found, layout, name):
        by_uid = {uid: [r for r in rollouts_of(step) if r["uid"] == uid] for uid in uids_of(step)}
        for uid, group in by_uid.items():
            expected = scored_alone(found, name, uid)
            assert [r["index"] for r in group] == list(range(CASES[name].n))
            for ours, (ids, log_probs, score, _, error, greedy) in zip(group, expected, strict=True):
                assert (ours["ids"], ours["score"], ours["greedy"]) == (ids, score, greedy)
                assert (ours["error"] is not None) == error
                assert ours["log_probs"] == pytest.approx(log_probs, abs=2e-5)


@pytest.mark.parametrize("layout", ["1 rank", "2 ranks"])
@pytest.mark.parametrize("name", [name for name in REPEATABLE if not CASES[name].filter_groups.enable])
def test_the_progress_of_sampling_counts_every_prompt_once_and_once_for_its_baseline(found, layout, name):
    for step, drawn in steps_with_reference(found, layout, name):
        expected = len(drawn) // LAYOUTS[layout][0] * (1 + CASES[name].with_greedy)
        assert step["progress"] == [[[expected, expected]]] * LAYOUTS[layout][0]


@pytest.mark.parametrize("layout", ["1 rank", "2 ranks"])
@pytest.mark.parametrize("name", [name for name in REPEATABLE if CASES[name].filter_groups.enable])
def test_a_step_trains_on_the_oldest_groups_with_a_signal_and_counts_the_rest(found, layout, name):
    case, pool = CASES[name], []
    for step, drawn in steps_with_reference(found, layout, name):
        verdicts = {uid: verdict(found, name, uid) for uid in drawn}
        metrics = step["metrics"]
        for kind in ("kept", "all_right", "all_wrong", "out_of_band", "failed"):
            assert metrics[f"filter_groups/{kind}"] == list(verdicts.values()).count(kind), kind
        pool += [uid for uid in drawn if verdicts[uid] == "kept"]
        assert uids_of(step) == pool[: int(metrics["filter_groups/trained"])]
        if len(pool) >= case.prompts_per_step:
            assert len(uids_of(step)) == case.prompts_per_step
        wasted = [uid for uid in drawn if verdicts[uid] != "kept"]
        pool = pool[len(uids_of(step)) :]
        if not case.filter_groups.keep_surplus:
            wasted, pool = wasted + pool, []
        assert sorted(uid for of_rank in step["carried"] for uid in of_rank) == pool
        assert metrics["filter_groups/carried"] == len(pool)
        tokens = sum(len(ids) for uid in wasted for ids, *_ in scored_alone(found, name, uid))
        assert metrics["filter_groups/wasted_tokens"] == tokens
        responses = [response for uid in drawn for response in scored_alone(found, name, uid)]
        assert metrics["reward/num_excluded"] == sum(score is None for _, _, score, *_ in responses)
        assert metrics["reward/num_errors"] == sum(error for *_, error, _ in responses)


@pytest.mark.parametrize("name", [*CASES, *CURRICULUM_CASES])
def test_the_same_groups_train_on_1_and_2_ranks(found, name):
    for one, two in zip(*(found[layout]["cases"][name] for layout in ("1 rank", "2 ranks")), strict=True):
        assert one["drawn"] == two["drawn"]
        if "errors" in one or name == "a failure in a small round":  # which two calls fail depends on the worker
            continue
        assert [{**r, "log_probs": None} for r in rollouts_of(one)] == [
            {**r, "log_probs": None} for r in rollouts_of(two)
        ]
        for a, b in zip(rollouts_of(one), rollouts_of(two), strict=True):
            assert a["log_probs"] == pytest.approx(b["log_probs"], abs=2e-5)
        assert two["numbers"] == one["numbers"] * 2
        same = [{k: v for k, v in step["metrics"].items() if "timing" not in k} for step in (one, two)]
        assert same[0] == same[1]
        assert [line for line in one["said"] if "dynamic" in line] == [
            line for line in two["said"] if "dynamic" in line
        ]


@pytest.mark.parametrize("name", CURRICULUM_CASES)
def test_a_curriculum_draws_by_what_came_of_the_prompts_before_and_counts_it(found, name):
    """With the one reward the even rows have a signal, with the other all but the first."""
    case, pools, drawn = CURRICULUM_CASES[name], {}, 0
    is_mixed = {"curriculum": lambda row: row % 2 == 0, "curriculum, filtered": lambda row: row > 0}[name]
    for step in found["1 rank"]["cases"][name]:
        places = {r["uid"]: r["place"] for r in rollouts_of(step)}
        metrics, drawn = step["metrics"], step["drawn"] - drawn
        assert sum(metrics[f"curriculum/drawn_{pool}"] for pool in WEIGHTS) == drawn
        if not case.filter_groups.enable:  # every group that was drawn is seen
            assert list(places) == list(range(step["drawn"] - drawn, step["drawn"]))
            of_pool = Counter(pools.get(place, "unseen") for place in places.values())
            assert {pool: metrics[f"curriculum/drawn_{pool}"] for pool in WEIGHTS} == {p: of_pool[p] for p in WEIGHTS}
        pools |= {place: "mixed" if is_mixed(place) else "all_right" for place in places.values()}
        drawn = step["drawn"]
    if case.filter_groups.enable:
        assert metrics["curriculum/mixed"] == 5 and metrics["curriculum/all_wrong"] == 1
    else:
        of_pool = Counter(pools.values())
        assert [metrics[f"curriculum/{pool}"] for pool in WEIGHTS] == [
            24 - len(pools), of_pool["mixed"], of_pool["all_right"], 0
        ]  # fmt: skip
        assert of_pool["mixed"] > 5 and of_pool["all_right"] > 5


# Which prompts have a signal is known: trained, prompts drawn so far, left over, mini-batch size, mini-batches.
KNOWN = {
    "all": [([0, 1, 2, 3], 4, [], 8, 2), ([4, 5, 6, 7], 8, [], 8, 2)],
    "one rank without signal": [([0, 2, 4, 6], 8, [], 8, 2), ([8, 10, 12, 14], 16, [], 8, 2)],
    "cap": [([0], 8, [], 2, 2), ([8], 16, [], 2, 2)],
    "dropped": [([], 8, [], 0, 0), ([], 16, [], 0, 0)],
    "surplus kept": [([1, 2, 3, 4], 6, [5], 8, 2), ([5, 6, 7, 8], 9, [], 8, 2)],
    "surplus dropped": [([1, 2, 3, 4], 6, [], 8, 2), ([6, 7, 8, 9], 10, [], 8, 2)],
    "stale mini-batch": [([1, 2, 3, 4], 6, [5], 4, 4), ([5, 6, 7, 8], 9, [], 4, 4)],
    "unequal": [([0, 8, 16, 24], 48, [32, 40], 3, 4), ([32, 40, 48, 56, 64, 72, 80, 88], 96, [], 6, 4)],
    "more than an epoch": [([0, 2, 3, 5], 6, [], 8, 2), ([6, 8, 9, 11], 12, [], 8, 2)],
}


@pytest.mark.parametrize(("layout", "name"), [run for run in RUN if run[1] in KNOWN])
def test_steps_of_prompts_whose_signal_is_known(found, layout, name):
    steps = found[layout]["cases"][name]
    for step, (uids, drawn, carried, size, num_mini_batches) in zip(steps, KNOWN[name], strict=True):
        assert (uids_of(step), step["drawn"]) == (uids, drawn)
        assert sorted(uid for of_rank in step["carried"] for uid in of_rank) == carried
        assert {tuple(numbers[:2]) for numbers in step["numbers"]} == {(size, num_mini_batches)}
        sizes = [row["mini_batch"] for row in step["rows"]]
        assert [sizes.count(place) for place in range(num_mini_batches)] == [size] * num_mini_batches


def test_a_rank_whose_groups_have_no_signal_takes_part_in_every_round(found):
    for step in found["2 ranks"]["cases"]["one rank without signal"]:
        assert [len(of_rank) for of_rank in step["by_rank"]] == [16, 0]
        assert step["metrics"]["train/num_gen_batches"] == 2


def test_a_short_step_says_so_in_one_line_and_a_full_one_nothing(found):
    for name, steps in found["2 ranks"]["cases"].items():
        for step in (step for step in steps if "errors" not in step):
            lines = [line for line in step["said"] if line.startswith("here: dynamic sampling")]
            case = (CASES | CURRICULUM_CASES)[name]
            is_short = case.filter_groups.enable and len(uids_of(step)) < case.prompts_per_step
            assert len(lines) == is_short, name
            others = [line for line in step["said"] if line.startswith("here") and line not in lines]
            assert all("the reward of" in line or "reward worker(s)" in line for line in others)
    said = {name: found["2 ranks"]["cases"][name][0]["said"][0] for name in ("cap", "dropped", "unequal")}
    assert "1 of 4 groups" in said["cap"] and "2 round(s) (dropped: 7 all wrong): it trains on 1;" in said["cap"]
    assert "0 of 4" in said["dropped"] and "(dropped: 3 all right, 5 all wrong): it is skipped;" in said["dropped"]
    assert "6 of 8" in said["unequal"] and "it trains on 4, 2 left for the next step;" in said["unequal"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_carried_group_is_stale_and_keeps_the_engines_log_probs(found, layout):
    first, second = found[layout]["cases"]["surplus kept"]
    assert not any(any_stale for _, _, any_stale in first["numbers"]) and all(row["trainers"] for row in first["rows"])
    assert all(any_stale for _, _, any_stale in second["numbers"])
    for r in rollouts_of(second):
        assert r["num_stale"] == (len(r["ids"]) if r["uid"] == 5 else 0)
    for row in second["rows"]:
        assert row["engines" if row["uid"] == 5 else "trainers"]
        assert not row["trainers" if row["uid"] == 5 else "engines"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_carried_group_stays_out_of_the_mismatch_with_the_engine(found, layout):
    for step in found[layout]["cases"]["surplus kept"]:
        fresh = [row for row in step["rows"] if row["uid"] != 5]
        mean = sum(row["difference"] for row in fresh) / sum(row["tokens"] for row in fresh)
        assert step["mismatch"]["training/rollout_log_probs_diff/mean"] == pytest.approx(mean, rel=1e-5)


def test_of_tensor_parallel_ranks_one_holds_the_groups(found):
    for name in TENSOR_PARALLEL_CASES:
        for step in found["tensor parallel 2"]["cases"][name]:
            if "errors" not in step:
                assert step["by_rank"][1] == [] and step["carried"][1] == []
                assert len(step["rows"]) == len(step["by_rank"][0])
                assert step["metrics"]["filter_groups/trained"] == len(uids_of(step))


NO_NUMBER = {"no such metric": "'accuracy'", "a text as metric": "'pred'"}


@pytest.mark.parametrize(("layout", "name"), [run for run in RUN if run[1] in NO_NUMBER])
def test_a_metric_that_the_reward_lacks_ends_all_ranks_alike(found, layout, name):
    [step] = found[layout]["cases"][name]
    assert len(step["errors"]) == LAYOUTS[layout][0] and len({tuple(error) for error in step["errors"]}) == 1
    kind, text = step["errors"][0]
    assert kind == "UserError" and "; --filter-groups.metric; " in text, text
    assert f"no number {NO_NUMBER[name]};" in text and "expected one of score, acc; " in text


def test_reward_code_that_always_fails_ends_the_first_round(found):
    for layout in ("1 rank", "2 ranks"):
        [step] = found[layout]["cases"]["failures"]
        assert {kind for kind, _ in step["errors"]} == {"RewardError"} and step["drawn"] == 4


def test_a_failure_or_two_in_a_small_round_are_a_share_of_the_whole_step(found):
    for layout in ("1 rank", "2 ranks"):
        first, second = found[layout]["cases"]["a failure in a small round"]
        assert second["drawn"] - first["drawn"] == 3 and uids_of(second) == [5, 6, 7, 8]
        assert second["metrics"]["reward/num_errors"] == 2  # of 12 responses: above the allowed share of 0.15


def test_the_mean_greedy_score_is_of_the_prompts_that_have_one(found):
    for name in ("greedy", "greedy, n 1", "greedy, filtered"):
        some_fail = 0
        for step, drawn in steps_with_reference(found, "2 ranks", name):
            scores = [reward(CASES[name].reward, uid, found["1 rank"]["greedy"][uid][0][1])[0] for uid in drawn]
            scored = [score for score in scores if score is not None]
            assert step["metrics"]["remax/greedy_score"] == pytest.approx(statistics.fmean(scored))
            some_fail += len(scores) - len(scored)
            assert all(math.isfinite(r["greedy"]) for r in rollouts_of(step) if r["score"] is not None)
        assert some_fail or name == "greedy, n 1"


def test_workers_that_outgrow_their_memory_are_counted_and_told_and_their_scores_are_kept(found):
    """That the scores are those of other workers is in the tests above."""
    for layout in ("1 rank", "2 ranks"):
        [step] = found[layout]["cases"]["greedy, n 1"]
        assert step["metrics"]["reward/num_outgrown_workers"] == 8  # the responses, greedy ones among them
        told = [line for line in step["said"] if "8 reward worker(s) held too much memory" in line]
        assert len(told) == 1 and told[0].startswith("here: warning: ")
        for step in found[layout]["cases"]["greedy"]:
            assert step["metrics"]["reward/num_outgrown_workers"] == 0


def test_a_greedy_response_that_timed_out_counts_as_time_out_for_its_group():
    group, greedy = make_rollouts(num_groups=1, n=2), make_rollouts(num_groups=1, n=1)[0]
    for error, kind in (("timed out after 1 s", "timeouts"), ("KeyError", "errors"), (None, "declined")):
        excluded = _with_greedy_score(group, replace(greedy, score=Score(score=None, error=error)))
        counts = check_error_rate(excluded, RewardConfig(max_error_rate=1), SINGLE)
        expected = {"errors": 0, "timeouts": 0, "declined": 0, "excluded": 2} | {kind: 2}
        assert counts == {f"reward/num_{name}": count for name, count in expected.items()}


# ---- The whole command ----


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a model, its tokenizer, and training and validation questions."""
    folder = tmp_path_factory.mktemp("sampling_runs")
    make_model(folder / "model")
    make_tokenizer(folder / "model")
    make_questions(folder / "train.parquet", count=40, start=0)
    make_questions(folder / "val.parquet", count=4, start=100)
    return folder


def options(folder, run, *more, script="train_grpo.py"):
    return (
        script, "--model.path", str(folder / "model"), "--data.train-files", str(folder / "train.parquet"),
        "--data.val-files", str(folder / "val.parquet"), "--data.max-prompt-len", "24", "--data.shuffle", "False",
        "--rollout.max-response-len", "12", "--rollout.n", "4", "--rollout.max-num-seqs", "32", "--prompts-per-step",
        "4", "--mini-batch-size", "8", "--max-tokens-per-gpu", "80", "--optim.lr", "1e-3", "--reward.path",
        "tests/sampling_rewards.py", "--reward.name", "in_stages", "--reward.num-workers", "1", "--run-dir",
        str(folder / run), *more,
    )  # fmt: skip


DOCUMENTED = set(re.findall(r"`([^`]+)`", (ROOT / "docs/metrics.md").read_text()))


def check_documented(rows):
    for name in {name for row in rows for name in row if name != "step"}:
        generic = re.sub(r"^(val-\w+)/test/\w+/", r"\1/SOURCE/VARIABLE/", name).replace("mean@1", "mean@N")
        assert re.sub("_rs_(token|seq)_([a-z]*_)?k[123]", "_rs_STATISTIC", generic) in DOCUMENTED, name


@pytest.fixture(scope="module")
def short_steps(files):
    """ReMax with a KL in the reward, length shaping, rejection: no group, one, four of five, and the fifth's turn."""
    words = options(
        files, "short", "--num-steps", "4", "--eval.every", "1", "--filter-groups.enable", "True",
        "--filter-groups.max-rounds", "2", "--advantage", "remax", "--kl-reward.coef", "0.05", "--kl-reward.target",
        "1e-6", "--kl-reward.horizon", "16", "--overlong.buffer-len", "4", "--correction", "decoupled_geo_rs_token_tis",
    )  # fmt: skip
    done = prefork(2, *words, vllm=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done, files / "short", {row["step"]: row for row in read_metrics(files / "short")}


def test_a_step_without_any_group_is_skipped_and_everything_else_goes_on(short_steps):
    done, run, rows = short_steps
    assert list(rows) == [0, 1, 2, 3, 4]
    skipped = rows[1]
    assert skipped["filter_groups/trained"] == 0 and skipped["train/num_gen_batches"] == 2
    assert skipped["actor/skipped_updates"] == 0 and "actor/grad_norm" not in skipped
    assert math.isnan(skipped["critic/score/mean"]) and "NaN" in (run / "metrics.jsonl").read_text().splitlines()[1]
    samples = [(run / f"samples/step_{step}.jsonl").read_text() for step in range(5)]
    assert samples[0] == samples[1] and len(set(samples[1:])) == 4  # the weights moved in all steps but the first
    assert skipped["timing_s/gen"] > 0 and skipped["filter_groups/wasted_tokens"] > 0
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    assert (run / "learning_curve.png").exists()
    assert "groups       rounds of sampling, 2 at most, until 4 groups differ in score; groups beyond" in done.stdout
    assert "step 1/4: dynamic sampling found 0 of 4 groups" in done.stdout and "it is skipped" in done.stdout


def test_a_short_step_trains_on_what_there_is_and_surplus_in_the_next(short_steps):
    done, _, rows = short_steps
    lines = [line for line in done.stdout.splitlines() if "dynamic sampling" in line]
    assert len(lines) == 2 and "step 2/4: dynamic sampling found 1 of 4" in lines[1] and "trains on 1;" in lines[1]
    assert [rows[step]["filter_groups/trained"] for step in (2, 3, 4)] == [1, 4, 4]
    assert [rows[step]["filter_groups/carried"] for step in (2, 3, 4)] == [0, 1, 0]
    assert [rows[step]["train/num_gen_batches"] for step in (2, 3, 4)] == [2, 2, 1]
    assert [rows[step]["training/stale_tokens_ratio"] for step in (2, 3)] == [0, 0]
    assert 0.1 < rows[4]["training/stale_tokens_ratio"] < 0.5
    for step in (2, 3, 4):
        assert rows[step]["actor/grad_norm"] > 0 and rows[step]["training/rollout_log_probs_diff/max"] < 1e-4
        assert all(math.isfinite(value) for value in rows[step].values()), rows[step]
    check_documented(rows.values())


def test_the_weight_of_the_kl_rests_in_a_skipped_step_and_then_follows_its_target(short_steps):
    rows = short_steps[2]
    coefs = [rows[step]["actor/reward_kl_penalty_coeff"] for step in (1, 2, 3, 4)]
    assert math.isnan(rows[1]["actor/reward_kl_penalty"]) and coefs[0] == coefs[1] == 0.05
    assert coefs[1] != coefs[2] < coefs[3]  # 4, then 16 responses of a horizon of 16; the KL is above its target


def test_the_terminal_says_what_matters_alone(short_steps):
    done, _, _ = short_steps
    for noise in ("INFO", "WARNING", "Warning", "Traceback"):
        assert noise not in done.stdout + done.stderr, done.stdout + done.stderr


MATRIX = {
    "optimal_token_baseline, clip_cov, kl": (
        "--advantage", "optimal_token_baseline", "--loss", "clip_cov", "--kl-reward.coef", "0.1",
        "--overlong.buffer-len", "6", "--overlong.factor", "0.5", "--overlong.mask-truncated", "True",
        "--rollout.stop", *string.ascii_letters,
    ),
    "gspo, decoupled_geo_rs": ("--loss", "gspo", "--correction", "decoupled_geo_rs"),
    "bypass_pg_is, filtered": ("--correction", "bypass_pg_is", "--filter-groups.enable", "True"),
    "remax, n 1": ("--advantage", "remax", "--rollout.n", "1", "--mini-batch-size", "2", "--num-steps", "4"),
    "filtered without log-probs": (
        "--filter-groups.enable", "True", "--rollout.log-probs", "False", "--filter-groups.keep-surplus", "False",
    ),
}  # fmt: skip


def run_alone(files, run, *more, script="train_grpo.py"):
    """The finished command in one process, and its metrics."""
    done = prefork(0, *options(files, run, *more, script=script), vllm=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = read_metrics(files / run)
    check_documented(rows)
    return done, rows


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRIX)
def test_options_together_train_two_steps_with_finite_documented_metrics(files, name):
    run = re.sub(r"\W+", "_", name)
    done, rows = run_alone(files, run, "--reward.name", "of_all", "--num-steps", "2", *MATRIX[name])
    assert "no signal" not in done.stdout and "dynamic sampling found" not in done.stdout
    assert ("differ in score" in done.stdout) == ("--filter-groups.enable" in MATRIX[name])
    for row in rows[1:]:
        assert all(map(math.isfinite, row.values())), {k: v for k, v in row.items() if not math.isfinite(v)}
        assert row["actor/grad_norm"] > 0


@pytest.mark.slow
def test_ppo_too_skips_a_step_without_any_group(files):
    words = ("--num-steps", "3", "--filter-groups.enable", "True", "--filter-groups.max-rounds", "2")
    _, rows = run_alone(files, "ppo", *words, "--critic.model.path", str(files / "model"), script="train_ppo.py")
    assert [row["filter_groups/trained"] for row in rows[1:]] == [0, 1, 4]
    assert "critic/grad_norm" not in rows[1] and rows[2]["critic/grad_norm"] > 0
    assert all(map(math.isfinite, rows[3].values()))
