"""The engine's layout is learned from one load: of real engines, and of loaders that do what loaders may do."""

import json

import pytest
import torch

from lib.engine.layout import learn_layout, unused_sources, unwritten_targets
from tests.layout_worker import KINDS, NORM
from tests.prefork import prefork

CPU = torch.device("cpu")


def learn(loader, shapes, **held):
    """The layout after `loader(sources, held)`, of sources of random numbers with these shapes by name."""
    sources = {name: torch.randn(shape) for name, shape in shapes.items()}
    layout = learn_layout(lambda given: loader(dict(given), held), sources.items(), held)
    return layout, sources


def rebuild(layout, sources, target, like):
    made = torch.full_like(like, torch.nan)
    for box in layout.boxes[target]:
        box.place(made).copy_(torch.zeros(box.shape) if box.source is None else box.part(sources[box.source]))
    return made


# ---- Loaders ----


def stack(given, held):
    held["t"].data[:2].copy_(given["a"])
    held["t"].data[2:].copy_(given["b"])


def transpose(given, held):
    held["t"].copy_(given["a"].t())


def interleave(given, held):
    held["t"][::2].copy_(given["a"])
    held["t"][1::2] = given["b"]


def slice_of_columns(given, held):
    held["t"].copy_(given["a"].narrow(1, 3, 2))


def pad(given, held):
    held["t"][:3].copy_(given["a"])
    held["t"][3:].fill_(0)


def twice(given, held):
    held["t"].copy_(given["a"])
    held["t"].copy_(given["b"])


def repeat(given, held):
    held["t"].copy_(given["a"])  # one row for all


def over_a_part(given, held):
    held["t"].copy_(given["a"])
    held["t"][1].copy_(given["b"][0])


@pytest.mark.parametrize(
    ("loader", "shapes", "shape"),
    [
        (stack, {"a": (2, 3), "b": (4, 3)}, (6, 3)),
        (transpose, {"a": (3, 5)}, (5, 3)),
        (interleave, {"a": (2, 3), "b": (2, 3)}, (4, 3)),
        (slice_of_columns, {"a": (2, 7)}, (2, 2)),
        (pad, {"a": (3, 2)}, (5, 2)),
        (twice, {"a": (2, 2), "b": (2, 2)}, (2, 2)),
        (repeat, {"a": (1, 4)}, (3, 4)),
        (over_a_part, {"a": (2, 2), "b": (2, 2)}, (2, 2)),
    ],
)
def test_what_copies_do_is_learned_and_done_again_with_other_weights(loader, shapes, shape):
    target = torch.empty(shape)
    layout, sources = learn(loader, shapes, t=target)
    assert not layout.computed and not unwritten_targets(layout, {"t": target})
    assert torch.equal(rebuild(layout, sources, "t", target), target)
    others = {name: torch.randn(shape) for name, shape in shapes.items()}
    loader(others, {"t": target})
    assert torch.equal(rebuild(layout, others, "t", target), target)


@pytest.mark.parametrize(
    ("loader", "shapes", "shape", "expected"),
    [
        (stack, {"a": (2, 3), "b": (1, 3)}, (3, 3), True),
        (interleave, {"a": (2, 3), "b": (2, 3)}, (4, 3), True),
        (transpose, {"a": (3, 3)}, (3, 3), False),  # of the same shape
        (slice_of_columns, {"a": (2, 7)}, (2, 2), False),
        (lambda given, held: held["t"].copy_(given["a"][2:]), {"a": (4, 3)}, (2, 3), False),
    ],
)
def test_a_box_says_whether_it_takes_its_source_whole_and_as_it_lies(loader, shapes, shape, expected):
    layout, _ = learn(loader, shapes, t=torch.empty(shape))
    assert [box.takes_whole(shapes[box.source]) for box in layout.boxes["t"]] == len(shapes) * [expected]


@pytest.mark.parametrize(
    "loader",
    [
        lambda given, held: held["t"].copy_(-given["a"].exp()),
        lambda given, held: held["t"].copy_(given["a"].clone()),  # a copy of a copy: not followed
        lambda given, held: (held["t"].copy_(given["a"]), held["t"].mul_(2)),
        lambda given, held: held["t"].fill_(1),
        lambda given, held: torch.add(given["a"], 1, out=held["t"]),
        lambda given, held: torch._foreach_copy_([held["t"]], [given["a"]]),
        lambda given, held: held["t"].copy_(given["a"].double()),
    ],
)
def test_what_a_loader_computes_is_known_as_that(loader):
    target, kept = torch.empty(2, 3), torch.empty(2)
    layout, _ = learn(lambda g, h: (loader(g, h), h["kept"].zero_()), {"a": (2, 3)}, t=target, kept=kept)
    assert layout.computed == {"t"} and set(layout.boxes) == {"kept"}
    assert unused_sources([layout], {"a": (2, 3)}, CPU) == []  # nobody knows


def test_what_a_load_leaves_out_is_named():
    held = {"t": torch.empty(4, 3), "left": torch.empty(2)}
    layout, sources = learn(
        lambda given, held: held["t"][:3].copy_(given["a"][:, :3]), {"a": (3, 4), "b": (2,)}, **held
    )
    assert unwritten_targets(layout, held) == ["t", "left"]
    assert unused_sources([layout], {name: tuple(t.shape) for name, t in sources.items()}, CPU) == ["a", "b"]


def test_a_copy_that_changes_the_precision_counts_as_computed_and_one_that_is_replaced_does_not_count():
    """In a copy from float32 master weights the engine's precision would be the first one that rounds."""
    layout, _ = learn(
        lambda given, held: held["t"].copy_(given["a"]), {"a": (2,)}, t=torch.empty(2, dtype=torch.float64)
    )
    assert layout.computed == {"t"}
    layout, _ = learn(twice, {"a": (2, 2), "b": (2, 2)}, t=torch.empty(2, 2))
    assert [box.source for box in layout.boxes["t"]] == ["b"]


def test_what_one_rank_leaves_out_another_may_take():
    shapes = {"a": (4, 2)}
    ranks = [
        learn(
            lambda given, held, start=start: held["t"].copy_(given["a"][start : start + 2]), shapes, t=torch.empty(2, 2)
        )
        for start in (0, 2)
    ]
    assert unused_sources([layout for layout, _ in ranks], shapes, CPU) == []
    assert unused_sources([ranks[1][0]], shapes, CPU) == ["a"]


def test_sources_may_share_a_storage_and_an_address_may_be_used_again():
    whole, held = torch.randn(10), {"a": torch.empty(4), "b": torch.empty(6), "c": torch.empty(4)}

    def sources():
        yield "a", whole[:4]
        yield "b", whole[4:]
        for name in ("c", "unused"):
            yield name, torch.randn(4)  # of which the second one lies where the first one lay

    def load(given):
        for name, tensor in given:
            if name in held:
                held[name].copy_(tensor)

    layout = learn_layout(load, sources(), held)
    assert {name: [box.source for box in boxes] for name, boxes in layout.boxes.items()} == {n: [n] for n in held}
    assert layout.boxes["b"][0].source_offset == 0


# ---- Real engines ----


@pytest.fixture(scope="module", params=[1, 2])
def found(request, tmp_path_factory):
    """What the worker found with so many tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("layout")
    words = ("-m", "tests.layout_worker", str(folder), str(folder / "out.json"), str(request.param))
    done = prefork(request.param, *words, vllm=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_the_boxes_say_where_every_number_of_a_family_comes_from(found, kind):
    """qkv, gate and up stacked; heads, hidden units and a padded vocabulary split."""
    assert found[kind]["wrong"] == [] and found[kind]["computed"] == []
    norms_and_biases = {"qwen3": 2, "qwen2": 1, "llama": 0, "mistral": 0}[kind]
    assert found[kind]["tensors"] == found[kind]["verified"] == 2 * (6 + norms_and_biases) + 2 + (kind != "llama")


def test_where_a_loader_computes_every_sync_is_a_load_with_a_proof_of_its_own(found):
    last = found[KINDS[-1]]
    assert last["computed by a loader"] == [NORM] and last["verified by loads"] == last["tensors"]
    assert last["computed anew"]
    for name in (NORM, "lm_head.weight"):
        assert f"1 tensors differ in bits, such as {name}" in last[f"{name} changed"]
