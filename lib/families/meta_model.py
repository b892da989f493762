"""A model of transformers without its weights: parameters on the meta device, and buffers with their values.

Rotary tables and scales of embeddings are buffers that no file holds; whatever a family has of them, its own code
computes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lib.errors import UserError


def read_config(folder: Path) -> Any:
    """transformers' config object of a folder, defaults filled in. Raises UserError."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, return_dict=True)  # whatever the file says: outputs are read by name
    except Exception as error:  # KeyError, ValueError, dataclass validation
        raise _cannot_build(folder, error) from error


def build_causal_lm(folder: Path, *, dtype: torch.dtype = torch.float32, attention: str = "eager") -> nn.Module:
    """The causal language model of a folder, with parameters of this precision on the meta device. Raises UserError."""
    from transformers import AutoModelForCausalLM

    return _build(folder, AutoModelForCausalLM, dtype, attention)


def build_decoder(
    folder: Path, *, dtype: torch.dtype = torch.float32, attention: str = "eager", **changes: Any
) -> nn.Module:
    """Its decoder alone, without a head; `changes` of the config."""
    from transformers import AutoModel

    return _build(folder, AutoModel, dtype, attention, **changes)


def _build(folder: Path, auto_class: Any, dtype: torch.dtype, attention: str, **changes: Any) -> nn.Module:
    config = read_config(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    try:
        with parameters_on_meta():
            return auto_class.from_config(config, attn_implementation=attention, dtype=dtype)
    except Exception as error:
        raise _cannot_build(folder, error) from error


def _cannot_build(folder: Path, error: Exception) -> UserError:
    return UserError(
        f"transformers cannot build the model; {Path(folder) / 'config.json'}; found "
        f"{type(error).__name__}: {' '.join(str(error).split())[:300]}; mend that entry, or copy config.json again"
    )


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are made inside register parameters without memory. Buffers are left as they are."""
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # a tied one stays the same object
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        plain(module, name, parameter)

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = plain
