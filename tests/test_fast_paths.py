"""Fast paths step aside where vLLM is not as they declare; tests/fast_paths_worker.py breaks it name by name."""

import json
from types import SimpleNamespace

import pytest
import torch

from lib.engine.fast.needs import replaced
from lib.engine.fast.one_pass_sampling import difference
from lib.engine.fast.paths import PATHS
from tests.fast_paths_worker import cases, required_cases
from tests.prefork import prefork
from tests.tiny import make_model

NAMES = [path.name for path in PATHS]


def worker(num_ranks, out, *words):
    done = prefork(num_ranks, "-m", "tests.fast_paths_worker", words[0], str(out), *words[1:], vllm=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def needs(tmp_path_factory):
    """{case: what rank 1's broken need says, the paths left on rank 0, its warnings}."""
    return worker(2, tmp_path_factory.mktemp("needs") / "out.json", "needs")


@pytest.fixture(scope="module")
def required(tmp_path_factory):
    """{case: what rank 0 is told where rank 1's vLLM lacks what the engine cannot do without}."""
    return worker(2, tmp_path_factory.mktemp("required") / "out.json", "required")


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """{engine: what it sampled, and what was said}."""
    folder = tmp_path_factory.mktemp("engines")
    return worker(1, folder / "out.json", "engine", str(make_model(folder / "model", tied=False)))


@pytest.mark.parametrize("path", [path.name for path in PATHS if not path.on_gpu_only])
def test_the_installed_vllm_has_what_a_path_of_a_cpu_needs(needs, path):
    assert needs["installed"][path] is None


@pytest.mark.parametrize("path", NAMES)
def test_a_path_is_taken_where_everything_is_as_declared(needs, path):
    assert needs[path] == needs[f"{path}, mended"] == [[path], []]
    assert needs[f"{path}, off"] == [[], []]


@pytest.mark.parametrize("case", cases())
def test_a_path_steps_aside_with_its_line_on_all_ranks_where_one_finds_a_declared_name_broken(needs, case):
    said, left, warnings = needs[case]
    path = case.partition(" | ")[0]
    assert said and said.startswith("found ") and ", expected " in said
    assert left == []
    [line] = warnings
    assert line.startswith(f"the fast path {path} steps aside (") and "; found " in line and ", expected " in line
    assert "--rollout.fast-paths off" in line and "\n" not in line


@pytest.mark.parametrize("case", required_cases())
def test_a_name_without_which_nothing_runs_is_told_on_all_ranks_before_a_model_is_loaded(required, case):
    assert required["whole"] is None
    line = required[case]
    assert line.startswith("this vLLM lacks what the engine cannot do without; vLLM 0."), line
    assert "; found " in line and ", expected " in line and "; install one of the versions that work: " in line


@pytest.mark.parametrize("path", NAMES)
def test_a_path_steps_aside_in_a_version_that_it_was_not_tested_with(needs, path):
    [line] = needs[f"{path}, untested"]
    assert "expected one that it was tested with (0.1)" in line


def test_tokens_are_the_same_with_fast_paths_and_without(engines):
    assert engines["auto"]["names"] == ["quick start", "decode loop", "block hashes"] and engines["off"]["names"] == []
    assert engines["auto"]["warnings"] == engines["off"]["warnings"] == []
    assert len(engines["auto"]["rollouts"]) == 60 and max(len(r[2]) for r in engines["off"]["rollouts"][:30]) > 128
    assert engines["auto"]["rollouts"] == engines["off"]["rollouts"]
    assert engines["auto"]["episodes"] == engines["off"]["episodes"]


def test_further_turns_take_over_the_hashes_of_full_blocks(engines):
    """A block has 128 tokens on a CPU."""
    assert max(engines["auto"]["taken"]) == 1 and engines["auto"]["taken"].count(1) > 1
    assert engines["off"]["taken"] == []


@pytest.mark.parametrize(
    ("decoder", "found"),
    [
        ("Lossy", "other tokens"),
        ("Forgetful", "other steps for the same requests"),
        ("Endless", "AssertionError: requests that do not end"),
        ("Failing", "AttributeError: "),
    ],
)
def test_a_decode_loop_that_fails_its_self_check_steps_aside_and_the_tokens_stay(engines, decoder, found):
    assert engines[decoder]["names"] == ["quick start", "block hashes"]
    [line] = engines[decoder]["warnings"]
    assert "the fast path decode loop steps aside (the same tokens, more slowly)" in line and f"found {found}" in line
    assert engines[decoder]["rollouts"] == engines["off"]["rollouts"]


def test_what_is_replaced_is_replaced_whole_and_put_back():
    class Owner:
        @staticmethod
        def one():
            return "vLLM's"

    class Refuses:
        __slots__ = ("__dict__",)

        def __setattr__(self, name, value):
            raise AttributeError(name)

    ours, one = Owner(), vars(Owner)["one"]
    with replaced((Owner, "one", lambda self: "ours"), (ours, "other", 2)):
        assert ours.one() == "ours" and ours.other == 2
    assert vars(Owner)["one"] is one and vars(ours) == {}
    with pytest.raises(AttributeError), replaced((Owner, "one", None), (Refuses(), "one", None)):
        raise AssertionError("not reached")
    assert vars(Owner)["one"] is one


# ---- The self-check of one-pass sampling, whose kernels need a GPU: its rules, with slow samplers ----


def exponentials(requests, seeds, positions, width):
    rows = []
    for request, position in zip(requests.tolist(), positions.tolist(), strict=True):
        generator = torch.Generator().manual_seed(seeds[request].item() * 1000 + position)
        rows.append(torch.empty(width).exponential_(generator=generator))
    return torch.stack(rows)


def race(logits, requests, seeds, positions, temperatures):
    """What the kernels do: p_i / E_i decides, or p_i alone where the temperature is 0."""
    logits = logits.float()
    noise = exponentials(requests, seeds, positions, logits.shape[1])
    noise[temperatures[requests.long()] == 0] = 1.0
    tokens = (logits.softmax(-1) / noise).argmax(-1)
    return tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def gumbel_sample(logits, requests, temperatures, seeds, positions, apply_temperature):
    noise = -exponentials(requests, seeds + 7, positions, logits.shape[1]).log()
    noise[temperatures[requests.long()] == 0] = 0.0
    return (logits.float() + noise).argmax(-1)


def scores(logits, num_others, tokens, rows, *, max_per_req_token_ids, logits_mode):
    return SimpleNamespace(logprobs=logits.float().log_softmax(-1).gather(1, tokens[:, None]))


def without_greedy(logits, requests, seeds, positions, temperatures):
    return race(logits, requests, seeds, positions, torch.ones_like(temperatures))


def without_seed(logits, requests, seeds, positions, temperatures):
    return race(logits, requests, torch.zeros_like(seeds), torch.zeros_like(positions), temperatures)


def by_row(logits, requests, seeds, positions, temperatures):
    return race(logits, requests, seeds, torch.arange(len(positions)), temperatures)


def off_by_one(logits, *rest):
    tokens, log_probs = race(logits, *rest)
    return (tokens + 1) % logits.shape[1], log_probs


def hot(logits, *rest):
    return race(logits / 1.1, *rest)


def with_nan(logits, *rest):
    tokens, log_probs = race(logits, *rest)
    return tokens, log_probs * torch.nan


@pytest.mark.parametrize(
    ("ours", "found"),
    [
        (race, None),
        (without_greedy, "other tokens in float32 where no random number decides"),
        (without_seed, "tokens that do not depend on the seed"),
        (by_row, "tokens that depend on the place in a batch"),
        (off_by_one, "log-probs that differ by "),
        (hot, "log-probs that differ by "),
        (with_nan, "log-probs that differ by nan in float32"),
    ],
)
def test_one_pass_sampling_is_refused_where_it_samples_otherwise_than_vllm(ours, found):
    said = difference(ours, gumbel_sample, scores, vocab_size=500, device=torch.device("cpu"))
    assert said is None if found is None else said.startswith(found)
