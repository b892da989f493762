"""transformers' classes, lent to the engine: for families that vLLM has no code of its own for it runs transformers'.

It changes those classes for the whole process: built by a trainer, they would ask for the engine's configuration. So
the engine's modules get subclasses that keep the changes, and the classes become again what they were.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def lent_classes() -> Iterator[Callable[[nn.Module], None]]:
    """Notes which classes of transformers change inside; gives what undoes it, of a model that was built inside."""
    from vllm.compilation import decorators

    plain = decorators._support_torch_compile
    before: dict[type, tuple[tuple[type, ...], dict[str, Any]]] = {}

    def support_torch_compile(cls: type, *arguments: Any, **keywords: Any) -> type:
        if cls.__module__.startswith("transformers."):
            before.setdefault(cls, (cls.__bases__, dict(cls.__dict__)))
        return plain(cls, *arguments, **keywords)

    decorators._support_torch_compile = support_torch_compile
    try:
        yield lambda model: _give_back(before, model)
    finally:
        decorators._support_torch_compile = plain


def _give_back(before: dict[type, tuple[tuple[type, ...], dict[str, Any]]], model: nn.Module) -> None:
    for cls, (bases, attributes) in before.items():
        changes = {name: value for name, value in cls.__dict__.items() if attributes.get(name) is not value}
        added = tuple(base for base in cls.__bases__ if base not in bases)
        for name in changes:
            if name in attributes:
                setattr(cls, name, attributes[name])
            else:
                delattr(cls, name)
        cls.__bases__ = bases
        if not added:  # vLLM had changed nothing
            continue
        own = type(cls.__name__, (cls, *added), changes | {"__module__": cls.__module__})
        for module in model.modules():
            if type(module) is cls:
                module.__class__ = own
