"""vLLM's declared names broken one by one, and engines with and without fast paths, as JSON from rank 0.

torchrun --nproc_per_node=2 -m tests.fast_paths_worker needs|required OUT
torchrun --nproc_per_node=1 -m tests.fast_paths_worker engine OUT MODEL
"""

import copy
import inspect
import json
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

from lib.dist import init_distributed, shutdown_distributed
from lib.engine.conversations import converse
from lib.engine.engine import RolloutEngine
from lib.engine.fast import block_hashes, decode_loop
from lib.engine.fast.decode_loop import _Decoder
from lib.engine.fast.needs import Calls, Has, Replaces, Unmet, _find
from lib.engine.fast.paths import PATHS, FastPaths
from lib.engine.in_process import set_engine_environment, vllm_version
from lib.engine.required import NEEDS, ON_CPU, check_names
from lib.engine.rollout_config import RolloutConfig, Sampling
from lib.errors import UserError

RENAMED = "renamed_since"
GONE = object()


def ways(need):
    """The ways in which a newer vLLM may have broken what is declared."""
    if isinstance(need, Has):
        return [f"{way} {field}" for field in need.fields.split() for way in ("gone", "renamed")] or ["gone"]
    named = need.named if isinstance(need, Calls) else need.parameters
    one_more = ["one argument more"] + ["one optional argument more"] * isinstance(need, Replaces)
    return ["gone", "renamed", *one_more, *(f"renamed {name}" for name in named.split())]


def cases():
    """{case: (path, need, way)}, of all that is declared."""
    return {
        f"{path.name} | {type(need).__name__} {need.where.replace(':', ' ')} {place} | {way}": (path, need, way)
        for path in PATHS
        for place, need in enumerate(path.needs)
        for way in ways(need)
    }


def required_cases():
    """{case: (need, way)}, of all that the engine cannot do without on a CPU."""
    return {f"{need.where.replace(':', ' ')} | {way}": (need, way) for need in NEEDS + ON_CPU for way in ways(need)}


def place_of(where):
    """The module or class that has what is there, and its name."""
    before, _, name = where.rpartition("." if "." in where.partition(":")[2] else ":")
    if ":" not in before:
        return sys.modules[before], name
    return next(one for one in _find(before).__mro__ if name in vars(one)), name


@contextmanager
def put(owner, name, value):
    """`value` there, or nothing for GONE, and what was there in the end."""
    was = vars(owner).get(name, GONE)
    set_or_delete(owner, name, value)
    try:
        yield
    finally:
        set_or_delete(owner, name, was)


def set_or_delete(owner, name, value):
    if value is GONE:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def function_of(parameters):
    function = lambda *_, **__: None  # noqa: E731
    function.__signature__ = inspect.Signature(parameters)
    return function


def changed(parameters, way):
    """The parameters, one of them renamed, or with one more at the end."""
    if way.startswith("one "):
        default = None if "optional" in way else inspect.Parameter.empty
        more = inspect.Parameter(RENAMED, inspect.Parameter.KEYWORD_ONLY, default=default)
        at = len(parameters) - sum(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
        return [*parameters[:at], more, *parameters[at:]]
    name = way.removeprefix("renamed ")
    assert name in [one.name for one in parameters]
    return [one.replace(name=RENAMED) if one.name == name else one for one in parameters]


@contextmanager
def without_field(where, field, new_name):
    """A class or module without a field, which has a new name unless that is None."""
    owner = _find(where) if where.partition(":")[2] else sys.modules[where]
    with ExitStack() as stack:
        for one in getattr(owner, "__mro__", [owner]):
            if field in (fields := vars(one).get("__dataclass_fields__", {})):
                fields[new_name or "_"] = kept = fields.pop(field)
                stack.callback(fields.__setitem__, field, kept)
                stack.callback(fields.pop, new_name or "_")
            init = vars(one).get("__init__")
            if inspect.isfunction(init) and field in init.__code__.co_names:
                stack.callback(setattr, init, "__code__", init.__code__)
                names = tuple(new_name or "_" if name == field else name for name in init.__code__.co_names)
                init.__code__ = init.__code__.replace(co_names=names)
            if field in vars(one):
                was = vars(one)[field]
                try:
                    stack.enter_context(put(one, field, GONE))
                except (AttributeError, TypeError):  # of an enumeration: something that has all others
                    others = {name: None for name in dir(owner) if name != field}
                    stack.enter_context(put(*place_of(where), SimpleNamespace(**others)))
                    break
                if new_name:
                    stack.enter_context(put(one, new_name, was))
        yield


@contextmanager
def broken(need, way):
    """vLLM with this need broken in this way."""
    if isinstance(need, Has) and way != "gone":
        how, field = way.split()
        with without_field(need.where, field, RENAMED if how == "renamed" else None):
            yield
        return
    owner, name = place_of(need.where)
    was = vars(owner)[name]
    with ExitStack() as stack:
        if way in ("gone", "renamed"):
            for one in getattr(owner, "__mro__", [owner]):  # bases declare it too
                if name in vars(one):
                    stack.enter_context(put(one, name, GONE))
            if way == "renamed":
                stack.enter_context(put(owner, RENAMED, was))
        else:
            parameters = list(inspect.signature(_find(need.where)).parameters.values())
            ours = function_of(changed(parameters, way))
            stack.enter_context(put(owner, name, staticmethod(ours) if isinstance(was, staticmethod) else ours))
        yield


@contextmanager
def as_declared(path):
    """What the path replaces, with the very parameters that it declares, whatever this version's are."""
    with ExitStack() as stack:
        for need in path.needs:
            if isinstance(need, Replaces) and path.on_gpu_only:
                kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
                parameters = [inspect.Parameter(name, kind) for name in need.parameters.split()]
                stack.enter_context(put(*place_of(need.where), function_of(parameters)))
        yield


def of_the_needs(world):
    """What each broken need gives: its own message, the paths that are left, what people are told."""
    found, on_gpu = {}, replace(world, device=torch.device("cuda"))
    installed = ".".join(vllm_version().split(".")[:2])

    def taken(path, mode="auto"):
        on_this_version = replace(path, tested=(*path.tested, installed))
        paths = FastPaths(mode, on_gpu, paths=(on_this_version,))
        return paths.names, paths.warnings

    found["installed"] = {path.name: path.unmet() for path in PATHS}
    for path in PATHS:
        with as_declared(path):
            found[path.name] = taken(path)
    for case, (path, need, way) in cases().items():
        with as_declared(path), ExitStack() as stack:
            said = None
            if world.rank == 1:  # the other rank's vLLM is whole
                stack.enter_context(broken(need, way))
                try:
                    need.check()
                except Unmet as unmet:
                    said = str(unmet)
            found[case] = world.gather(said)[1], *taken(path)
    for path in PATHS:
        with as_declared(path):
            found[f"{path.name}, mended"] = taken(path)
            found[f"{path.name}, off"] = taken(path, "off")
            found[f"{path.name}, untested"] = FastPaths(
                "auto", on_gpu, paths=(replace(path, tested=("0.1",)),)
            ).warnings
    return found


def of_the_required(world):
    """What all ranks are told of each broken need, on rank 1 alone; None: nothing."""

    def said():
        try:
            world.agree(lambda: check_names(on_gpu=False))
        except UserError as error:
            return str(error)
        return None

    found = {"whole": said()}
    for case, (need, way) in required_cases().items():
        with broken(need, way) if world.rank == 1 else nullcontext():
            found[case] = said()
    return found


class Lossy(_Decoder):
    """Tells of other tokens than were sampled."""

    def _take(self, scheduled, result):
        rest = super()._take(scheduled, result)
        for one in self.decoding.values():
            one.tokens = [token + 1 for token in one.tokens]
        return rest


class Forgetful(_Decoder):
    """Does not tell the model of new KV blocks."""

    def schedule(self, *arguments):
        step = super().schedule(*arguments)
        step.scheduled_cached_reqs.new_block_ids[:] = [None] * len(step.scheduled_cached_reqs.req_ids)
        return step


class Endless(_Decoder):
    """Lets the scheduler believe that more is computed than was."""

    def schedule(self, *arguments):
        step = super().schedule(*arguments)
        for one in self.decoding.values():
            one.request.num_computed_tokens += 1
        return step


class Failing(_Decoder):
    """Knows a field by a name that it no longer has."""

    def schedule(self, *arguments):
        return self.scheduler.name_of_before


def of_the_engine(world, path):
    """Tokens with fast paths and without, and with a decode loop that the self-check must refuse."""
    from safetensors.torch import load_file

    from tests.conversations_worker import LATENCIES, InThreads, found_of, new
    from tests.rollout_worker import SAMPLES, generate, summary

    taken, keeping = [], block_hashes.keeping

    def watched(hasher):
        """Notes how many hashes each new request takes over, and that all are as vLLM's own hasher has them."""
        ours = keeping(hasher)

        def hashes(request):
            rest = ours(request)
            alone = copy.copy(request)
            alone.block_hashes = []
            assert hasher(alone) == [*request.block_hashes, *rest]
            taken.append(len(request.block_hashes))
            return rest

        return hashes

    def sample(fast_paths):
        engine = RolloutEngine(
            RolloutConfig(fast_paths=fast_paths, max_response_len=240, max_num_batched_tokens=2048), path,
            dtype="float32", max_prompt_len=8, most_responses=30, stop_token_ids=[3], world=world, seed=5,
        )  # fmt: skip
        engine.load_weights(weights)
        rollouts = generate(engine, SAMPLES, world, max_response_len=240)
        taken.clear()
        engine.sleep()  # forgets prefixes
        sampling = Sampling(n=1, max_response_len=240, temperature=1.0, log_probs=True)
        answers = InThreads(LATENCIES["none"], 0)
        episodes = found_of(converse(engine, new(SAMPLES), sampling, answers, join="step"))
        return {
            "episodes": sorted(map(str, episodes.items())),
            "taken": sorted(taken),
            "names": engine._fast_paths.names,
            "warnings": engine.warnings,
            "rollouts": [*summary(rollouts), *([r.rollout_log_probs] for r in rollouts)],
        }

    weights = list(load_file(f"{path}/model.safetensors").items())
    block_hashes.keeping = watched
    found = {"auto": sample("auto"), "off": sample("off")}
    for decoder in (Lossy, Forgetful, Endless, Failing):
        decode_loop._Decoder = decoder
        found[decoder.__name__] = sample("auto")
    return found


def main(part, out, *words):
    world = init_distributed()
    set_engine_environment(on_gpu=False)
    parts = {"needs": of_the_needs, "required": of_the_required, "engine": of_the_engine}
    found = parts[part](world, *words)
    if world.rank == 0:
        Path(out).write_text(json.dumps(found, indent=1))
    shutdown_distributed()


if __name__ == "__main__":
    main(*sys.argv[1:])
