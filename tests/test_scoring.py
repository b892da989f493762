"""Reward functions in real worker processes: good ones, broken ones, hung ones."""

import hashlib
import os
import subprocess
import sys
import textwrap
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lib.dist import SINGLE
from lib.errors import RewardError, UserError, error_line
from lib.rewards.scoring import RewardConfig, Scorer, check_error_rate, error_counts
from lib.rewards.trial import check_reward
from lib.rewards.worker import read_result
from lib.types import Rollout, Sample, Score
from tests.ranks import free_port

ROOT = Path(__file__).resolve().parent.parent
HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"


def make_rollout(i: int = 0, *, source: str = "mine", truth: object = "7", score: Score | None = None) -> Rollout:
    sample = Sample(uid=i, prompt_ids=[], data_source=source, ground_truth=truth, extra_info={"place": i})
    return Rollout(
        sample=sample, index=0, response_ids=[], rollout_log_probs=None, finish_reason="stop", score=score
    )  # fmt: skip


def write(folder: Path, body: str, name: str = "reward.py") -> str:
    """Writes a reward file; a body without `def` becomes compute_score's."""
    body = textwrap.dedent(body)
    text = body if "def " in body else HEAD + textwrap.indent(body, "    ")
    (folder / name).write_text(text)
    return str(folder / name)


def score_all(cfg: RewardConfig, texts: list[str], *, log_path: Path | None = None, **rollout) -> list[Score]:
    sources = {rollout.get("source", "mine")}
    with closing(Scorer(cfg, sources, log_path=log_path)) as scorer:
        for i, text in enumerate(texts):
            scorer.submit(make_rollout(i, **rollout), text)
        return [scored.score for scored in scorer.collect()]


def rows(*truths: object, source: str = "mine") -> dict[str, Sample]:
    return {f"file row {i}": make_rollout(i, source=source, truth=truth).sample for i, truth in enumerate(truths)}


# ---- What comes back ----


def test_function_gets_exactly_what_was_submitted(tmp_path):
    body = """
    keys = sorted(extra_info)
    same = ground_truth == {"a": [1, None, 2.5], "b": b"x"} and extra_info == {"place": 0} and data_source == "mine"
    return {"score": 3, "same": same, "text": solution_str, "length": len(solution_str)}
    """
    text = "Grüße \ud800 \x00 " + "x" * 300_000  # larger than a socket's buffer, and not valid UTF-8
    [score] = score_all(RewardConfig(path=write(tmp_path, body)), [text], truth={"a": [1, None, 2.5], "b": b"x"})
    assert score.error is None and score.score == 3.0
    returned = text[:10_000].encode(errors="backslashreplace").decode()  # half a pair of surrogates fits in no file
    assert score.extras == {"same": True, "text": returned, "length": float(len(text))}


def test_results_come_in_the_order_of_submission_for_any_number_of_workers(tmp_path):
    body = """
    import random, time
    time.sleep(0.02 * (len(solution_str) % 3))
    return {"score": len(solution_str), "random": random.random(), "hash": float(hash(solution_str) % 1000)}
    """
    path = write(tmp_path, body)
    texts = ["x" * (i * 7 % 20) for i in range(20)]
    one, three = (score_all(RewardConfig(path=path, num_workers=n), texts) for n in (1, 3))
    assert [score.score for score in one] == [len(text) for text in texts]
    assert one == three
    assert len({score.extras["random"] for score in one}) == len(one)


def test_collect_empties_the_scorer(tmp_path):
    with closing(Scorer(RewardConfig(path=write(tmp_path, "return 1")), {"mine"})) as scorer:
        assert scorer.collect() == []
        for first in (0, 10):
            for i in range(first, first + 3):
                scorer.submit(make_rollout(i), "x")
            assert [rollout.sample.uid for rollout in scorer.collect()] == [first, first + 1, first + 2]


def test_a_coroutine_function_is_awaited(tmp_path):
    body = """
    import asyncio
    async def compute_score(data_source, solution_str, ground_truth, extra_info, bonus):
        await asyncio.sleep(0.01)
        if not solution_str:
            raise ValueError("nothing")
        if solution_str == "leave":
            raise SystemExit(5)
        return len(solution_str) + bonus
    """
    cfg = RewardConfig(path=write(tmp_path, body), kwargs={"bonus": 0.5}, num_workers=1)
    scores = score_all(cfg, ["ab", "", "leave", "abc"])
    assert [score.score for score in scores] == [2.5, None, None, 3.5]
    assert scores[1].error.startswith("ValueError: nothing [reward.py:6 in compute_score:")
    assert scores[2].error.startswith("SystemExit: 5")


def test_built_in_graders_are_chosen_by_data_source():
    sources = {"arithmetic", "openai/gsm8k", "lighteval/MATH"}
    cases = [("arithmetic", "72", 1), ("arithmetic", "#### 72", 0), ("openai/gsm8k", "#### 72", 1)]
    cases += [("openai/gsm8k", "72", 0), ("lighteval/MATH", r"\boxed{\frac{144}{2}}", 1), ("unknown", "72", None)]
    with closing(Scorer(RewardConfig(num_workers=1), sources)) as scorer:
        for i, (source, text, _) in enumerate(cases):
            scorer.submit(make_rollout(i, source=source, truth="72"), text)
        scored = scorer.collect()
    assert [rollout.score.score for rollout in scored] == [score for _, _, score in cases]
    assert "no grader for data source 'unknown'" in scored[-1].score.error


def test_kwargs_choose_the_flexible_gsm8k_grader():
    cfg = RewardConfig(kwargs={"method": "flexible"}, num_workers=1)
    read = [Score(score=1.0, extras={"pred": "7"}), Score(score=0.0, extras={"pred": "8"})]
    assert score_all(cfg, ["so 7", "#### 8"], source="openai/gsm8k") == read


def test_a_response_without_a_number_that_the_advantage_asks_for_has_failed(tmp_path):
    lens = "{'4': 4, 'nan': float('nan'), 'text': 'long', 'yes': True, 'far': 1e39}"
    path = write(tmp_path, f"return {{'score': 1, **({{'len': {lens}[solution_str]}} if solution_str else {{}})}}")
    texts = ["4", "nan", "text", "yes", "far", ""]
    with closing(Scorer(RewardConfig(path=path), {"mine"}, reward_keys=("score", "len"))) as scorer:
        for i, text in enumerate(texts):
            scorer.submit(make_rollout(i), text)
        scores = [rollout.score for rollout in scorer.collect()]
    assert [score.score for score in scores] == [1.0, None, None, 1.0, None, None]
    errors = {score.error for score in scores if score.score is None}
    assert errors == {"returned no finite number 'len', which --advantage.reward-keys asks for"}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("True", 1.0),
        ("-3", -3.0),
        ("numpy.float32(0.5)", 0.5),
        ("numpy.int64(4)", 4.0),
        ("numpy.bool_(True)", 1.0),
        ("numpy.array(2.0)", 2.0),
        ("torch.tensor(0.25)", 0.25),
        ("torch.tensor([2], dtype=torch.int8)", 2.0),
        ("{'score': torch.tensor(0.5)}", 0.5),
        ("None", None),
        ("{'score': None, 'why': 'unreadable'}", None),
    ],
)
def test_scalars_of_every_library_become_floats(expression, expected):
    value = eval(expression, {"torch": torch, "numpy": pytest.importorskip("numpy")})
    score, _ = read_result(value)
    assert score == expected and type(score) in (float, type(None))


@pytest.mark.parametrize(
    "expression",
    [
        *("float('nan')", "-float('inf')", "'1.0'", "b'1'", "[1.0]", "(1.0, 2.0)", "{}", "{'acc': 1.0}", "1j"),
        *("torch.tensor([1.0, 2.0])", "torch.tensor(float('nan'))", "{'score': 'high'}", "{'score': [1]}"),
        *("10**400", "object()"),
    ],
)
def test_values_that_are_no_score_are_errors(expression):
    with pytest.raises((TypeError, ValueError), match="returned"):
        read_result(eval(expression, {"torch": torch}))


def test_extras_keep_numbers_bools_and_strings_only():
    values = {"score": 1, "acc": True, "num": torch.tensor(3), "pred": "7", "none": None, "nan": float("nan")}
    score, extras = read_result(values | {"list": [1], 5: 6})
    assert score == 1.0
    assert extras == {"acc": True, "num": 3.0, "pred": "7", "5": 6.0}
    assert extras["acc"] is True and type(extras["num"]) is float


def test_keys_made_of_any_text_become_short_printable_names(tmp_path):
    texts = ["\ud800 half", "two\nlines", "\x1b[2Jclear", "\u202ereversed", "long " * 1000, "7"]
    body = "return {'score': 1, solution_str: 2, 5: 3, 'why ' + solution_str: 'so'}"
    scores = score_all(RewardConfig(path=write(tmp_path, body), num_workers=1), texts)
    assert [next(iter(score.extras)) for score in scores[:4]] == [
        *("\\ud800 half", "two lines", "\\x1b[2Jclear", "\\u202ereversed"),
    ]
    for score in scores:
        assert score.score == 1.0 and list(score.extras.values()) == [2.0, 3.0, "so"] and "5" in score.extras
        assert all(name.isprintable() and len(name) <= 100 for name in score.extras)


def test_what_an_error_quotes_is_printable_and_short(tmp_path):
    body = """
    if solution_str == "many":
        return {"score": 1, **{str(i): i for i in range(1000)}}
    if solution_str == "keys":
        return {"\\x1b[31m" + str(i): i for i in range(1000)}
    raise ValueError("bad answer " + solution_str)
    """
    texts = ["many", "keys", "\x1b[2J\x07 \ud800\n\x9bA" + "x" * 1000]
    scores = score_all(RewardConfig(path=write(tmp_path, body), num_workers=1), texts)
    assert scores[0].error.startswith("ValueError: returned a dict with 1001 keys, expected at most 1000")
    assert "without the key 'score'; found \\x1b[31m0, \\x1b[31m1" in scores[1].error
    assert scores[2].error.startswith("ValueError: bad answer \\x1b[2J\\x07 \\ud800 \\x9bAxxx")
    assert all(score.error.isprintable() and len(score.error) < 700 for score in scores)
    with pytest.raises(RewardError, match=r"bad answer .x1b") as caught:
        check_error_rate([make_rollout(score=score) for score in scores[2:]], RewardConfig(), SINGLE)
    assert error_line(caught.value).isprintable()


# ---- Checks at start ----


def test_the_trial_of_a_reward_for_episodes_has_what_these_add(tmp_path):
    body = (
        "assert extra_info['reply'] == solution_str; return sum(extra_info['turn_rewards']) + extra_info['num_turns']"
    )
    cfg = RewardConfig(path=write(tmp_path, body))
    assert "warning" not in check_reward(cfg, {"mine"}, rows("7", "8"), of_episodes=True)
    with pytest.raises(RewardError, match="KeyError: 'reply'"):
        check_reward(cfg, {"mine"}, rows("7", "8"))


def test_check_names_function_file_and_hash(tmp_path):
    path = write(tmp_path, "import sys\nprint('hello')\ndef compute_score(**given): return 1")
    line = check_reward(RewardConfig(path=path), {"mine"}, rows("7", "8"))
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    assert line == (
        f"reward: compute_score in {path} (sha256 {digest}); "
        "warning: importing it printed 6 bytes (they go to the reward log)"
    )


def test_check_accepts_the_built_in_graders():
    sources = {"arithmetic", "openai/gsm8k", "lighteval/MATH", "HuggingFaceH4/MATH-500"}
    assert check_reward(RewardConfig(), sources, rows("7", "8", source="arithmetic")) == (
        "reward: lib.rewards.math for HuggingFaceH4/MATH-500 and lighteval/MATH, "
        "lib.rewards.arithmetic for arithmetic, lib.rewards.gsm8k for openai/gsm8k"
    )


@pytest.mark.parametrize(
    ("returned", "all_declined"),
    [
        ("None", True),
        ("{'score': None}", True),
        ("None if ground_truth == '7' else 1", False),
        ("0", False),
        ("{'score': 1, 'pred': 'x'}", False),
    ],
)
def test_check_accepts_scores_and_declined_rows(tmp_path, returned, all_declined):
    line = check_reward(RewardConfig(path=write(tmp_path, f"return {returned}")), {"mine"}, rows("7", "8"))
    told = "warning: it returned None for all of 2 trials: what has no score is not trained on"
    assert (told in line) == all_declined


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        ({}, ["no built-in grader for data source 'mine'", "arithmetic, openai/gsm8k", "--reward.path FILE"]),
        ({"path": "missing.py"}, ["no such file", "--reward.path missing.py"]),
        ({"path": "."}, ["a directory"]),
    ],
)
def test_wrong_flags_are_user_errors(cfg, words):
    with pytest.raises(UserError) as caught:
        check_reward(RewardConfig(**cfg), {"mine"}, rows("7"))
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def compute_score(:", ["does not import", "SyntaxError", "line 1"]),
        ("import no_such_module\ndef f(): pass", ["does not import", "No module named 'no_such_module' [reward.py:1"]),
        ("import sys\nsys.exit('def ')", ["does not import", "SystemExit"]),
        (
            "from lib.losses import ClipLoss",
            ["lib.losses has moved", "`from lib.algorithms import NAME`"],
        ),
        ("def other(): pass\nfrom os.path import join", ["has no function compute_score", "found other, expected"]),
        ("compute_score = 'def '", ["has no function compute_score", "found no function"]),
        (
            "def compute_score(solution_str, ground_truth): pass",
            ["takes other arguments", "found compute_score(solution_str, ground_truth)", "data_source, solution_str"],
        ),
        ("def compute_score(data_source, solution_str, ground_truth, extra_info, more): pass", ["'more'"]),
        (
            HEAD + "    return solution_str.split()[0]",
            ["trial", "row 0", "'7'", "response ''", "IndexError", "reward.py"],
        ),
        (HEAD + "    return 1 if not solution_str else 'high'", ["row 1", "returned 'high' (str)"]),
        (HEAD + "    return {'reward': 1}", ["without the key 'score'; found reward"]),
        (HEAD + "    return float('nan')", ["returned nan"]),
        (HEAD + "    import time\n    time.sleep(60)", ["timed out after 5 s"]),
        (HEAD + "    import os\n    os._exit(7)", ["exited with code 7"]),
    ],
)
def test_broken_reward_code_is_a_reward_error(tmp_path, body, words):
    cfg = RewardConfig(path=write(tmp_path, body), timeout_s=5.0)  # what does not hang takes milliseconds
    with pytest.raises(RewardError) as caught:
        check_reward(cfg, {"mine"}, rows("7", "8"))
    assert caught.value.code == 4
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_kwargs_that_a_built_in_grader_does_not_take_are_refused():
    for source, kwargs, reason in (
        ("arithmetic", {"method": "flexible"}, "found method, expected none"),
        ("openai/gsm8k", {"mode": 1, "a": 2}, "found a, mode, expected method"),
        ("openai/gsm8k", {"method": "loose"}, 'expected "strict" or "flexible"'),
    ):
        with pytest.raises(UserError, match=reason):
            check_reward(RewardConfig(kwargs=kwargs), {source}, rows("7", source=source))


def test_a_file_may_import_its_neighbours_without_hiding_the_standard_library(tmp_path):
    (tmp_path / "helper.py").write_text("VALUE = 5")
    (tmp_path / "json.py").write_text("raise RuntimeError('not the real one')")
    (tmp_path / "fractions.py").write_text("raise RuntimeError('not the real one')")
    path = write(tmp_path, "import fractions, json, helper\n" + HEAD + "    return helper.VALUE")
    assert score_all(RewardConfig(path=path, num_workers=1), ["x"]) == [Score(score=5.0)]


@pytest.mark.parametrize(
    "bad",
    [
        *({"timeout_s": 0.0}, {"timeout_s": float("nan")}, {"timeout_s": float("inf")}),
        *({"max_error_rate": -0.1}, {"max_error_rate": 1.5}, {"max_error_rate": float("nan")}),
        *({"path": ""}, {"name": "a b"}, {"num_workers": 0}, {"kwargs": {"extra_info": 1}}),
    ],
)
def test_values_out_of_range_are_refused_with_their_flag(bad):
    [name] = bad
    with pytest.raises(UserError, match="--reward." + name.replace("_", "-")):
        RewardConfig(**bad)


def test_a_recipe_passes_its_own_function_by_file_and_name(tmp_path):
    """The worker imports the recipe's file, but not as the main script."""
    recipe = write(
        tmp_path,
        """
        from lib.rewards import RewardConfig

        def my_reward(data_source, solution_str, ground_truth, extra_info):
            return len(solution_str)

        config = RewardConfig(path=__file__, name="my_reward", num_workers=1)
        if __name__ == "__main__":
            raise RuntimeError("started the run")
        """,
    )
    assert score_all(RewardConfig(path=recipe, name="my_reward", num_workers=1), ["four"]) == [Score(score=4.0)]


# ---- Error rate ----


def scored(*scores: Score) -> list[Rollout]:
    return [make_rollout(i, score=score) for i, score in enumerate(scores)]


GOOD, DECLINED = Score(score=1.0), Score(score=None)
FAILED, LATE = Score(score=None, error="ValueError: x"), Score(score=None, error="timed out after 10 s")


def test_failures_are_counted_by_kind():
    step = scored(GOOD, DECLINED, FAILED, FAILED, LATE, GOOD, DECLINED, DECLINED)
    assert check_error_rate(step, RewardConfig(max_error_rate=0.4), SINGLE) == {
        "reward/num_errors": 2.0,
        "reward/num_timeouts": 1.0,
        "reward/num_declined": 3.0,
        "reward/num_excluded": 6.0,
    }
    assert error_counts(step) == {"ValueError: x": 2, "timed out after 10 s": 1}


def test_run_stops_above_the_rate_but_not_at_it():
    step = scored(*[GOOD] * 16, FAILED, LATE, LATE, DECLINED)
    check_error_rate(step, RewardConfig(max_error_rate=0.15), SINGLE)  # 3 of 20
    with pytest.raises(RewardError) as caught:
        check_error_rate(step, RewardConfig(max_error_rate=0.149), SINGLE)
    assert "3 of the step's 20 responses (15.0%)" in str(caught.value)
    assert "2 times: timed out after 10 s" in str(caught.value)


def test_environments_that_fail_are_named_where_they_are_most_of_what_failed():
    gone = Score(score=None, error="Guess.step: KeyError: 7")
    failed = [replace(it, finish_reason="error") for it in scored(gone, gone)]
    with pytest.raises(
        RewardError, match=r"an environment failed for 3 .*--turns.path; 2 times: Guess.step.*-s or --rew"
    ):
        check_error_rate([*failed, *scored(FAILED, GOOD)], RewardConfig(), SINGLE)
    with pytest.raises(RewardError, match=r"scoring failed for 4 .*built-in graders; .*--reward.timeout-s or --rew"):
        check_error_rate([*failed, *scored(FAILED, FAILED)], RewardConfig(), SINGLE)


def test_a_rate_of_0_stops_at_the_first_failure_and_1_never():
    with pytest.raises(RewardError):
        check_error_rate(scored(*[GOOD] * 99, FAILED), RewardConfig(max_error_rate=0.0), SINGLE)
    check_error_rate(scored(FAILED, LATE), RewardConfig(max_error_rate=1.0), SINGLE)
    check_error_rate([], RewardConfig(max_error_rate=0.0), SINGLE)


TWO_RANKS = """
import torch.distributed as dist
from lib.dist import init_distributed
from tests.test_scoring import *
world = init_distributed()
step = scored(*[GOOD] * 10) if world.rank == 0 else scored(*[GOOD] * 8, FAILED, FAILED)
print(check_error_rate(step, RewardConfig(max_error_rate=0.1), world)["reward/num_errors"], flush=True)
try:
    check_error_rate(step, RewardConfig(max_error_rate=0.09), world)
except RewardError as error:
    print("2 of the step's 20" in str(error) and "2 times: ValueError: x" in str(error), flush=True)
dist.destroy_process_group()
"""


def test_all_ranks_stop_together_on_the_rate_over_all_ranks():
    port = free_port()
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_RANKS],
            cwd=ROOT,
            env=env | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    assert [rank.communicate()[0].split() for rank in ranks] == [["2.0", "True"]] * 2
