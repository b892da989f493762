"""What is needed of vLLM, and whether the installed vLLM has it. Nothing here needs a GPU.

A path declares every callable that it calls or replaces, every field that it reads or writes, and the versions that it
was tested with. They are looked up when an engine is built; where one is not there, the path is not installed.
"""

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from lib.engine.in_process import vllm_version


class Unmet(Exception):
    """A need that vLLM does not meet: `found ..., expected ...`."""


class Need(Protocol):
    """Something of vLLM's. `where` is `module:name` or `module:Class.name`."""

    where: str

    def check(self) -> None:
        """Raises Unmet where the installed vLLM does not have it."""


@dataclass(frozen=True)
class Calls:
    """A callable that a path calls, with these arguments by position, then those by name (their names, with spaces)."""

    where: str
    arguments: str = ""
    named: str = ""

    def check(self) -> None:
        """Raises Unmet where such a call does not fit vLLM's signature."""
        signature = _signature(self.where)
        try:
            signature.bind(*self.arguments.split(), **dict.fromkeys(self.named.split()))
        except TypeError as error:
            call = ", ".join([*self.arguments.split(), *(f"{name}=" for name in self.named.split())])
            raise Unmet(f"found {_name(self.where)}{_in_words(signature)}, expected one for ({call})") from error


@dataclass(frozen=True)
class Replaces:
    """A callable in whose place a path puts its own: what vLLM may pass to it are these parameters, and no other."""

    where: str
    parameters: str

    def check(self) -> None:
        """Raises Unmet where vLLM's has other parameters, or has them in another order."""
        signature = _signature(self.where)
        if list(signature.parameters) != self.parameters.split():
            expected = ", ".join(self.parameters.split())
            raise Unmet(f"found {_name(self.where)}{_in_words(signature)}, expected ({expected})")


@dataclass(frozen=True)
class Has:
    """A class or module with these fields (their names, with spaces): class attributes, or set by its `__init__`."""

    where: str
    fields: str

    def check(self) -> None:
        """Raises Unmet where one of them is not there."""
        has = _fields(_find(self.where))
        for name in self.fields.split():
            if name not in has:
                raise Unmet(f"found no {_name(self.where)}.{name}, expected one")


def first_unmet(needs: Iterable[Need]) -> str | None:
    """`found ..., expected ...` of the first need that is not met; None where all are."""
    for need in needs:
        try:
            need.check()
        except Unmet as unmet:
            return str(unmet)
        except Exception as error:  # whatever another version does where one looks
            return f"found {type(error).__name__}: {' '.join(str(error).split())[:200]}, expected {need.where}"
    return None


@dataclass(frozen=True, kw_only=True)
class FastPath:
    """A way of ours in place of one of vLLM's, which does the same more slowly."""

    name: str
    tested: tuple[str, ...]
    """The versions of vLLM with which its tests have passed, such as 0.30."""
    needs: tuple[Need, ...]
    without: str = "the same tokens, more slowly"
    """What comes of vLLM's own way."""
    on_gpu_only: bool = False
    while_building: Callable[[], AbstractContextManager[None]] = nullcontext
    """Holds while an engine is built."""
    while_sampling: Callable[[Any], AbstractContextManager[None]] = nullcontext
    """Holds while an engine, vLLM's LLMEngine, samples."""
    self_check: Callable[[Any], str | None] = lambda engine: None
    """What the path does otherwise than vLLM's own way, in an engine that was just built; None: nothing."""

    def unmet(self) -> str | None:
        """`found ..., expected ...` of the first need that is not met, or of the version; None where all is well."""
        if unmet := first_unmet(self.needs):
            return unmet
        found = vllm_version()
        if ".".join(found.split(".")[:2]) in self.tested:
            return None
        return f"found vLLM {found}, expected one that it was tested with ({', '.join(self.tested)})"

    def differs(self, engine: Any) -> str | None:
        """`found ..., expected ...` where the self-check fails, be it with an exception; None where it passes."""
        try:
            found = self.self_check(engine)
        except Exception as error:  # whatever another version does there
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return found and f"found {found}, expected what vLLM's own way does"


@contextmanager
def replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Puts (owner, name, ours) in place of vLLM's: all of them, or none where one cannot be put."""
    with ExitStack() as stack:
        for owner, name, ours in places:
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, ours)
        yield


def _find(where: str) -> Any:
    module, _, names = where.partition(":")
    try:
        found = import_module(module)
    except Exception as error:  # a module's own imports may fail in any way
        raise Unmet(f"found no module {module} ({type(error).__name__}), expected one") from error
    try:
        for name in names.split(".") if names else ():
            found = getattr(found, name)
    except AttributeError as error:
        raise Unmet(f"found no {_name(where)}, expected one") from error
    return found


def _signature(where: str) -> inspect.Signature:
    found = _find(where)
    try:
        return inspect.signature(found)
    except (TypeError, ValueError) as error:
        raise Unmet(f"found {_name(where)}, whose arguments are not known, expected a function") from error


def _fields(owner: Any) -> set[str]:
    """The names of a module, or of a class: its attributes, its dataclass fields, and what its `__init__` sets."""
    names = set(dir(owner))
    for one in getattr(owner, "__mro__", ()):
        names |= set(vars(one).get("__dataclass_fields__", ()))
        if inspect.isfunction(init := vars(one).get("__init__")):
            names |= {step.argval for step in dis.get_instructions(init) if step.opname == "STORE_ATTR"}
    return names


def _name(where: str) -> str:
    module, _, names = where.partition(":")
    last = module.rpartition(".")[2]
    return names if "." in names else f"{last}.{names}" if names else last


def _in_words(signature: inspect.Signature) -> str:
    return f"({', '.join(signature.parameters)})"
