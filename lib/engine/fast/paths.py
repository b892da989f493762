"""Which fast paths an engine takes, and what people are told of the others."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from lib.dist import World
from lib.engine.fast import attention_splits, block_hashes, decode_loop, one_pass_sampling, quick_start
from lib.engine.fast.needs import FastPath
from lib.engine.in_process import vllm_version

PATHS = (quick_start.PATH, attention_splits.PATH, decode_loop.PATH, one_pass_sampling.PATH, block_hashes.PATH)


class FastPaths:
    """The fast paths of one engine: on all ranks those whose needs are met, and whose self-check passes, on all."""

    def __init__(self, mode: Literal["auto", "off"], world: World, *, paths: tuple[FastPath, ...] = PATHS) -> None:
        """Looks up what the paths need in vLLM, which it imports. Executed by all ranks together."""
        on_gpu = world.device.type == "cuda"
        self._world, self.warnings = world, []
        self._paths = tuple(path for path in paths if mode == "auto" and (on_gpu or not path.on_gpu_only))
        self._keep(FastPath.unmet)

    @property
    def names(self) -> list[str]:
        """Those that are taken."""
        return [path.name for path in self._paths]

    def check(self, engine: Any) -> None:
        """The self-checks, for vLLM's LLMEngine that was just built. Executed by all ranks together."""
        self._keep(lambda path: path.differs(engine))

    def _keep(self, problem_of: Callable[[FastPath], str | None]) -> None:
        """Leaves out the paths with a problem on any rank: ranks that share a model must sample alike."""
        problems: dict[str, str] = {}
        for of_rank in self._world.gather([(path.name, problem_of(path)) for path in self._paths]):
            for name, problem in of_rank:
                if problem:
                    problems.setdefault(name, problem)
        self.warnings += [
            f"the fast path {path.name} steps aside ({path.without}); vLLM {vllm_version()}; {problems[path.name]}; "
            f"install vLLM {' or '.join(path.tested)}, or say --rollout.fast-paths off"
            for path in self._paths
            if path.name in problems
        ]
        self._paths = tuple(path for path in self._paths if path.name not in problems)

    @contextmanager
    def while_building(self) -> Iterator[None]:
        """Holds while vLLM is built."""
        with ExitStack() as stack:
            for path in self._paths:
                stack.enter_context(path.while_building())
            yield

    @contextmanager
    def while_sampling(self, engine: Any) -> Iterator[None]:
        """Holds while vLLM's LLMEngine samples."""
        with ExitStack() as stack:
            for path in self._paths:
                stack.enter_context(path.while_sampling(engine))
            yield
