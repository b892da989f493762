"""What a family's head does to the logits before they are log-probs, and the proof that it is all it does."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lib.errors import UserError

DIVISORS = ("logits_scaling",)  # Granite
FACTORS = ("logit_scale", "lm_head_multiplier")  # Cohere, Falcon-H1
PROBED_TOKENS, PROBED_ROWS = 8, 64


def logits_divisor(config: Mapping[str, Any]) -> float:
    """What the product of hidden state and head is divided by, by a config as a dict: 1 for most families.

    Raises UserError for a scale that is not a finite number other than 0.
    """
    divisor = 1.0
    for name in DIVISORS:
        divisor *= _scale(config, name)
    for name in FACTORS:
        divisor /= _scale(config, name)
    return divisor


def _scale(config: Mapping[str, Any], name: str) -> float:
    scale = 1.0 if config.get(name) is None else config[name]
    if type(scale) not in (int, float) or not math.isfinite(scale) or scale == 0:
        raise UserError(
            f"config.json has no usable {name}; a {config.get('model_type')} model; found {scale!r}, expected a finite "
            "number other than 0; mend that entry, or copy config.json again"
        )
    return scale


def check_head(causal_lm: nn.Module) -> None:
    """Raises UserError unless transformers' own forward makes logits of hidden states as `logits_divisor` says.

    Its decoder is replaced by one that gives eight random rows, its head by one of 64 rows; the model may be on the
    meta device. Takes milliseconds.
    """
    config = causal_lm.config
    generator = torch.Generator().manual_seed(0)
    hidden = 4 * torch.randn(1, PROBED_TOKENS, config.hidden_size, generator=generator)
    weight = torch.randn(PROBED_ROWS, config.hidden_size, generator=generator)
    probe = copy.copy(causal_lm)
    probe._modules = dict(causal_lm._modules)  # the model keeps its own
    head = nn.Linear(config.hidden_size, PROBED_ROWS, bias=False)
    head.weight = nn.Parameter(weight, requires_grad=False)
    probe._modules |= {"model": _Given(hidden), "lm_head": head}
    try:
        with torch.no_grad():
            found = probe(input_ids=torch.zeros(1, PROBED_TOKENS, dtype=torch.long)).logits.float()
    except Exception as error:
        raise UserError(
            f"the model's head wants more of its decoder than hidden states; {type(causal_lm).__name__}; found "
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}; choose another model"
        ) from error
    expected = hidden @ weight.T / logits_divisor(config.to_dict())
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-4, atol=1e-4):
        raise UserError(
            f"the model's head does more than a product and a scale; {type(causal_lm).__name__}; found logits up to "
            f"{float(found.abs().max()):.3g}, expected up to {float(expected.abs().max()):.3g}; soft-caps and other "
            "functions of the logits are not supported: choose another model"
        )


class _Given(nn.Module):
    """A decoder that gives these hidden states, whatever it gets."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **keywords: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=self.hidden)
