"""Partial rollouts, with real engines: what is interrupted, how it goes on, when a group trains.

tests/sampling_worker.py runs the cases; what must come of a response is worked out from the prompt sampled alone and
from vLLM's own generate on the prompt with what the response had when it was interrupted.
"""

import json
import math
from itertools import pairwise

import pytest

from lib.data.tokenizer import load_tokenizer
from lib.tracking.run import read_metrics
from tests import sampling_rewards
from tests.prefork import prefork
from tests.sampling_worker import MANY_STOP_IDS, PARTIAL_CASES, RESPONSE_LEN
from tests.test_sampling import DOCUMENTED, options
from tests.tiny import make_model, make_questions, make_tokenizer

LAYOUTS = {"1 rank": (1, 1), "2 ranks": (2, 1), "tensor parallel 2": (2, 2)}
RUNS = [(layout, name) for layout in LAYOUTS for name in PARTIAL_CASES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("partial")
    make_model(folder / "model", tied=False)
    make_tokenizer(folder / "model")
    ends = {"eos_token_id": MANY_STOP_IDS}  # responses of many lengths
    (folder / "model/generation_config.json").write_text(json.dumps(ends))
    make_questions(folder / "train.parquet", count=120, start=0)
    make_questions(folder / "val.parquet", count=4, start=200)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """{layout: what the worker found}."""
    results = {}
    for layout, (num_ranks, tp_size) in LAYOUTS.items():
        out = folder / f"{num_ranks}{tp_size}.json"
        words = ("-m", "tests.sampling_worker", str(folder), str(out), str(tp_size), *PARTIAL_CASES)
        done = prefork(num_ranks, *words, vllm=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        results[layout] = json.loads(out.read_text())
    return results


@pytest.fixture(scope="module")
def continued(found):
    """{(uid, index, ids so far): (ids to come, their log-probs)}, each sampled alone."""
    of_one = found["1 rank"]["continued"]
    return {(uid, index, tuple(ids)): (to_come, log_probs) for (uid, index, ids), to_come, log_probs in of_one}


def rollouts_of(step):
    return [r for of_rank in step["by_rank"] for r in of_rank]


def unfinished_of(step):
    """{(uid, index): (ids so far, times interrupted)}; tensor-parallel ranks all hold the same."""
    return {(uid, index): (tuple(ids), times) for of_rank in step["unfinished"] for uid, index, ids, times in of_rank}


@pytest.mark.parametrize("layout", ["1 rank", "tensor parallel 2"])
@pytest.mark.parametrize("name", [name for name, case in PARTIAL_CASES.items() if not case.filter_groups.enable])
def test_a_response_goes_on_from_where_it_was_interrupted_as_if_it_were_alone(found, continued, layout, name):
    interrupted, num_checked = {}, 0
    for step in found[layout]["cases"][name]:
        for r in rollouts_of(step):
            so_far, log_probs = (), []
            key = (r["uid"], r["index"])
            alone_ids, _, alone_log_probs = found["1 rank"]["alone"][r["uid"]][r["index"]]
            for ids, _ in interrupted.get(key, []):
                assert r["ids"][: len(ids)] == list(ids)
            if key in interrupted:
                assert r["num_continued"] == sum(len(ids) > 0 for ids, _ in interrupted[key])
                so_far = interrupted[key][-1][0]
                to_come, log_probs = continued[(*key, so_far)]
                num_checked += 1
            else:
                to_come, log_probs = alone_ids, alone_log_probs
            assert r["ids"] == [*so_far, *to_come]
            assert r["log_probs"][len(so_far) :] == pytest.approx(log_probs, abs=2e-5)
            first = interrupted[key][0][0] if key in interrupted else alone_ids
            assert r["ids"][: len(first)] == alone_ids[: len(first)]
            assert r["log_probs"][: len(first)] == pytest.approx(alone_log_probs[: len(first)], abs=2e-5)
        for key, state in unfinished_of(step).items():
            interrupted.setdefault(key, []).append(state)
    assert num_checked > 5


@pytest.mark.parametrize(("layout", "name"), RUNS)
def test_a_group_trains_once_whole_in_the_step_in_which_its_last_response_ends(found, layout, name):
    case, trained, was_open = PARTIAL_CASES[name], set(), set()
    for step in found[layout]["cases"][name]:
        by_uid = {}
        for r in rollouts_of(step):
            by_uid.setdefault(r["uid"], []).append(r)
        for group in by_uid.values():
            assert [r["index"] for r in group] == list(range(case.n))
        assert not trained & by_uid.keys()
        trained |= by_uid.keys()
        still_open = {uid for uid, _ in unfinished_of(step)}
        assert {int(uid) for of_rank in step["open"] for uid in of_rank} <= still_open
        if not case.filter_groups.enable:  # otherwise some are dropped or left over
            assert trained | still_open == set(range(step["drawn"])) and not trained & still_open
            assert by_uid.keys() == (was_open | set(range(step["drawn"]))) - still_open - (trained - by_uid.keys())
        was_open = still_open
    assert len(trained) > case.prompts_per_step


@pytest.mark.parametrize(("layout", "name"), RUNS)
def test_the_progress_of_sampling_counts_every_response_that_ends(found, layout, name):
    case, num_replicas = PARTIAL_CASES[name], LAYOUTS[layout][0] // LAYOUTS[layout][1]
    for before, step in pairwise([{"drawn": 0, "unfinished": [[], []]}, *found[layout]["cases"][name]]):
        if case.filter_groups.enable:
            continue  # several rounds a step
        num_new = (step["drawn"] - before["drawn"]) // num_replicas
        for rank, [(total, done)] in enumerate(step["progress"]):
            older, left = (len(one["unfinished"][rank]) for one in (before, step))
            assert total == older + num_new * (case.n + case.with_greedy) and done == total - left > 0


@pytest.mark.parametrize(("layout", "name"), RUNS)
def test_a_replica_stops_at_its_share_and_bounds_how_often_a_response_is_interrupted(found, layout, name):
    case, (num_ranks, tp_size) = PARTIAL_CASES[name], LAYOUTS[layout]
    if case.filter_groups.enable:
        return  # several rounds a step
    most = 0
    for replica in range(num_ranks // tp_size):
        before, drawn = {}, 0
        for step in found[layout]["cases"][name]:
            new = [uid for uid in range(drawn, step["drawn"]) if (uid - drawn) % (num_ranks // tp_size) == replica]
            after = {(uid, index): times for uid, index, _, times in step["unfinished"][replica * tp_size]}
            total = len(before) + len(new) * case.n
            assert len(after) <= total - math.ceil(case.partial_share * total)
            assert not any(times >= case.max_continued for times in after.values())
            most = max([most, *(r["num_continued"] for r in rollouts_of(step))])
            before, drawn = after, step["drawn"]
    assert most == case.max_continued or (name != "partial, bounded" and 1 <= most <= case.max_continued)


def test_a_step_stops_no_later_than_its_share(found):
    """With all in flight every step of the engine gives each a token: the first step is worked out from those alone."""
    for name in ("partial", "partial, bounded", "partial, many mini-batches"):
        case, step = PARTIAL_CASES[name], found["1 rank"]["cases"][name][0]
        alone = found["1 rank"]["alone"][: step["drawn"]]
        lens = {(uid, i): len(alone[uid][i][0]) for uid in range(step["drawn"]) for i in range(case.n)}
        num_steps = sorted(lens.values())[math.ceil(case.partial_share * len(lens)) - 1]
        expected = {key: alone[key[0]][key[1]][0][:num_steps] for key, length in lens.items() if length > num_steps}
        assert {key: list(ids) for key, (ids, _) in unfinished_of(step).items()} == expected and expected
        assert num_steps < RESPONSE_LEN


@pytest.mark.parametrize("name", PARTIAL_CASES)
def test_one_replica_of_two_ranks_samples_and_trains_on_the_same(found, name):
    for one, two in zip(*(found[layout]["cases"][name] for layout in ("1 rank", "tensor parallel 2")), strict=True):
        assert two["unfinished"][0] == two["unfinished"][1] == one["unfinished"][0]
        assert two["by_rank"][1] == [] and two["open"][1] == {}
        assert [{**r, "log_probs": None} for r in rollouts_of(one)] == [
            {**r, "log_probs": None} for r in rollouts_of(two)
        ]


@pytest.mark.parametrize(("layout", "name"), RUNS)
def test_tokens_that_an_earlier_step_sampled_keep_the_engines_log_probs(found, layout, name):
    num_stale, before, drawn = 0, {}, 0
    for step in found[layout]["cases"][name]:
        expected = {}
        for r in rollouts_of(step):
            key = (r["uid"], r["index"])
            ended_before = r["uid"] < drawn and key not in before
            expected[key] = len(r["ids"]) if ended_before else len(before[key][0]) if key in before else 0
            assert r["num_stale"] == expected[key]
        for row in step["rows"]:
            if row["tokens"]:  # the others are excluded
                assert row["num_engines"] == expected[row["uid"], row["index"]]
        num_stale += sum(expected.values())
        assert {any_stale for *_, any_stale in step["numbers"]} == {any(expected.values())}
        before, drawn = unfinished_of(step), step["drawn"]
    assert num_stale


@pytest.mark.parametrize(("layout", "name"), RUNS)
def test_scores_mini_batches_and_counts(found, folder, layout, name):
    case = PARTIAL_CASES[name]
    tokenizer = load_tokenizer(folder / "model", chat_template_kwargs={})
    before = 0
    for step in found[layout]["cases"][name]:
        for r in rollouts_of(step):
            text = tokenizer.decode(r["ids"], skip_special_tokens=True)
            if r["score"] is not None:
                value = getattr(sampling_rewards, case.reward)("test", text, str(r["uid"]), {"index": r["uid"]})
                assert r["score"] == (value["score"] if isinstance(value, dict) else value)
        if case.with_greedy:
            scored = [r for r in rollouts_of(step) if r["score"] is not None]
            assert scored and all(r["greedy"] is not None for r in scored)
        [(size, num_mini_batches, _)] = {tuple(numbers) for numbers in step["numbers"]}
        sizes = [[row["mini_batch"] for row in step["rows"]].count(place) for place in range(num_mini_batches)]
        num_rows = len(rollouts_of(step))
        assert sum(sizes) == num_rows and all(size == other for other in sizes[:-1])
        if num_rows and not case.filter_groups.enable:  # about as large as asked, and a row for every rank
            assert size >= LAYOUTS[layout][0] and abs(num_mini_batches - num_rows / case.mini_batch_size) <= 1
        assert step["metrics"]["partial/continued"] == before
        before = step["metrics"]["partial/unfinished"]
        assert before == len(unfinished_of(step))


def test_a_filtered_step_trains_on_groups_with_a_signal(found):
    for layout in LAYOUTS:
        for step in found[layout]["cases"]["partial, filtered"]:
            assert rollouts_of(step) and all(r["uid"] % 2 == 0 for r in rollouts_of(step))


# ---- The whole command ----


def test_a_run_learns_from_interrupted_responses(folder):
    words = options(
        folder, "run", "--num-steps", "4", "--eval.every", "0", "--rollout.partial-share", "0.6", "--reward.name",
        "of_all", "--mini-batch-size", "16",
    )  # fmt: skip
    done = prefork(2, *words, vllm=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    first, *others = read_metrics(folder / "run")[1:]
    assert "step 1/4: no group has all its responses yet: the step is skipped" in done.stdout
    assert first["partial/continued"] == 0 < first["partial/unfinished"] and "actor/grad_norm" not in first
    assert len(others) == 3 and others[0]["partial/continued"] == first["partial/unfinished"]
    for row in others:
        assert all(math.isfinite(value) for value in row.values())
        assert {name for name in row if name.startswith("partial/")} <= DOCUMENTED
        assert row["training/rollout_log_probs_diff/max"] < 1e-3  # of the tokens that this step sampled
        assert 0 < row["training/stale_tokens_ratio"] <= 1 and row["actor/grad_norm"] > 0
        # Before a single update only stale tokens ask for old log-probs (mini-batches of 16: at 24 there would be two).
        assert row["perf/total_num_tokens"] < 24 * (row["prompt_length/mean"] + row["response_length/mean"])
        assert row["timing_s/old_log_prob"] > 0
    assert all(abs(row["actor/ppo_kl"]) > 1e-3 for row in others[1:])  # the policy has left the one that sampled them


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rollout.partial-share", "0"), "--rollout.partial-share is out of range; found 0.0, expected in (0, 1]"),
        (("--rollout.partial-share", "0.5", "--rollout.log-probs", "False"), "responses continued in the next step"),
        (("--rollout.partial-share", "0.5", "--rollout.stop", "x"), "a stop string would be missed"),
        (("--rollout.partial-share", "0.5", "--loss", "gpg"), "has no ratio to correct responses continued"),
        (
            ("--rollout.partial-share", "0.5", "--loss", "gpg", "--correction", "bypass_ppo_clip"),
            "has no ratio to correct responses continued",
        ),
        (("--rollout.max-continued", "0"), "--rollout.max-continued is out of range"),
    ],
)
def test_what_cannot_go_together_is_refused(folder, words, said):
    done = prefork(1, *options(folder, "refused", *words))
    assert said in done.stdout + done.stderr and not (folder / "refused").exists()
