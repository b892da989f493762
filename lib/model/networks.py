"""The policy, whose head gives log-probs and entropies, never logits; the critic, whose head gives values.

Both are a decoder of transformers under a head of ours.

Weights are built on the meta device, sharded, and filled by rank 0 reading safetensors and broadcasting, one tensor
at a time: host memory does not grow with the number of ranks or the size of the model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lib.dist import World
from lib.errors import UserError
from lib.families.heads import logits_divisor
from lib.families.meta_model import build_causal_lm, build_decoder
from lib.families.supported import CAUSAL, VALUES
from lib.model.attention import PACKED, register_packed_attention
from lib.model.head import Statistic, linear_log_probs
from lib.model.lora import AdaptedLinear, LoRAConfig, adapt_, initial_factor
from lib.storage.adapter import (
    FACTORS,
    START,
    as_one_product,
    effective_weight,
    factors_of,
    is_adapter,
    put_effective_weight_,
)
from lib.storage.weights import AdaptedFolder, open_weights
from lib.storage.whole_tensors import SafetensorsFolder, ShardsFolder


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and how it computes."""

    path: str = ""
    """Hugging Face folder (config.json, safetensors, tokenizer) or hub id of the model; a run, or one of its
    checkpoints: for the weights alone."""
    reference_path: str | None = None
    """Another model that the KL holds the policy to, named as in path, of the same vocabulary; None: that of path."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute precision of trainer and engine, auto: bfloat16 on a GPU, float32 on a CPU; master weights: float32."""
    gradient_checkpointing: bool | None = None
    """Recompute each layer in the backward pass: about a third more compute, far less activation memory; None: only
    where a micro-batch of --max-tokens-per-gpu would not fit the GPU without."""

    def compute_dtype(self, world: World) -> torch.dtype:
        """The precision that `dtype` means on this device."""
        if self.dtype == "auto":
            return torch.bfloat16 if world.device.type == "cuda" else torch.float32
        return getattr(torch, self.dtype)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A tensor as engine, exports and evaluation see it."""

    sources: tuple[str, ...]
    """The parameters that it is made of: one, or a frozen weight and the factors of its adapter."""
    shape: tuple[int, ...]
    scale: float = 1.0
    """Of the adapter."""

    def make(self, *whole: Tensor) -> Tensor:
        """The tensor, of its whole sources in the precision that is wanted."""
        return whole[0] if len(whole) == 1 else effective_weight(whole[0], *as_one_product(*whole[1:]), self.scale)

    def add_(self, weight: Tensor, *factors: Tensor) -> None:
        """Makes the tensor of the frozen weight, in its place, and of the adapter's whole factors."""
        put_effective_weight_(weight, weight, *as_one_product(*factors), self.scale)


class Network(nn.Module):
    """What a policy and a critic have in common for those who copy and save them."""

    def exported(self) -> dict[str, Exported]:
        """{Hugging Face name: what it is made of}, in the order of the parameters. Asked for in every step: kept."""
        if "_exported" not in self.__dict__:
            self._exported = self._find_exported()
        return self._exported

    def _find_exported(self) -> dict[str, Exported]:
        shapes = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        scales = {
            f"{path}.weight": module.scale for path, module in self.named_modules() if isinstance(module, AdaptedLinear)
        }
        made = {name: Exported(sources=(name,), shape=shape) for name, shape in shapes.items() if not is_adapter(name)}
        for name, scale in scales.items():
            factors = (each for each in factors_of(name, with_start=True) if each in shapes)
            made[name] = Exported(sources=(name, *factors), shape=shapes[name], scale=scale)
        return made

    def trained(self) -> dict[str, nn.Parameter]:
        """{name: parameter} of what learns, and of what an adapter began with: what checkpoints hold."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad or is_adapter(name)}


class CausalPolicy(Network):
    """Decoder plus head. Its parameters carry the names of the Hugging Face checkpoint."""

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.config = causal_lm.config
        self.model = causal_lm.model
        self._layers = _layers(self.model)  # FSDP renames their classes
        self.tied = bool(self.config.tie_word_embeddings)
        self.logits_divisor = logits_divisor(self.config.to_dict())
        # A tied head is the embedding itself: one parameter, sharded, updated, synchronised and saved once.
        self.lm_head = None if self.tied else causal_lm.lm_head

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, cu_seq_lens: Tensor, max_len: int, positions: Tensor,
        labels: Tensor, temperature: float, statistic: Statistic,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Log-prob of each label and a statistic of the distribution it was drawn from: (M,) and (M,) float32.

        input_ids and position_ids (1, N) packed; positions (M,) are where the M labels are predicted (one token
        before each); logits are divided by `temperature`. Inside forward because only here FSDP shows whole weights.
        """
        hidden = _hidden_states(self.model, input_ids, position_ids, cu_seq_lens, max_len, positions)  # (M, H)
        weight = self.model.embed_tokens.weight if self.tied else self.lm_head.weight  # (V, H)
        # A head that scales its logits is one that samples at another temperature.
        temperature = temperature * self.logits_divisor
        return linear_log_probs(hidden, weight, labels, temperature=temperature, statistic=statistic)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order."""
        return self._layers


class Critic(Network):
    """Decoder plus value head. Its parameters carry the names of transformers' models for token classification."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.config = decoder.config
        self.model = decoder
        self._layers = _layers(decoder)
        self.score = nn.Linear(self.config.hidden_size, 1, dtype=decoder.dtype)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, cu_seq_lens: Tensor, max_len: int, positions: Tensor
    ) -> Tensor:
        """Value of the state at each position, which has seen the tokens up to there: (M, 1) float32.

        input_ids and position_ids (1, N) packed; positions (M,).
        """
        hidden = _hidden_states(self.model, input_ids, position_ids, cu_seq_lens, max_len, positions)  # (M, H)
        # Values are targets of a regression: whatever the layers compute in, the head computes in float32.
        return self.score(hidden.to(self.score.weight.dtype))  # (M, 1)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order."""
        return self._layers


def _layers(decoder: nn.Module) -> list[nn.Module]:
    """What transformers says must stay on one device: the decoder layers."""
    names = set(decoder._no_split_modules)
    return [module for module in decoder.modules() if type(module).__name__ in names]


def _hidden_states(
    decoder: nn.Module, input_ids: Tensor, position_ids: Tensor, cu_seq_lens: Tensor, max_len: int, positions: Tensor
) -> Tensor:
    hidden = decoder(
        input_ids=input_ids,
        position_ids=position_ids,
        cu_seq_lens_q=cu_seq_lens,
        cu_seq_lens_k=cu_seq_lens,
        max_length_q=max_len,
        max_length_k=max_len,
        use_cache=False,
    ).last_hidden_state[0]  # (N, H)
    return hidden[positions]  # (M, H)


def build_policy(folder: str, *, param_dtype: torch.dtype, lora: LoRAConfig | None = None) -> CausalPolicy:
    """The policy with parameters of the given precision on the meta device, and real buffers. Raises UserError.

    With `lora` of a rank above 0 they are frozen, and adapters of float32 are beside them.
    """
    register_packed_attention()
    policy = CausalPolicy(build_causal_lm(Path(folder), dtype=param_dtype, attention=PACKED))
    if lora is not None and lora.rank:
        adapt_(policy, lora)
    return policy


def build_critic(folder: str, *, param_dtype: torch.dtype) -> Critic:
    """The critic with parameters of the given precision on the meta device, and real buffers; its config is that of a
    folder to save. Raises UserError."""
    register_packed_attention()
    decoder = build_decoder(Path(folder), dtype=param_dtype, attention=PACKED, num_labels=1)
    decoder.config.architectures = [name.replace(CAUSAL, VALUES) for name in decoder.config.architectures]
    with torch.device("meta"):
        return Critic(decoder)


def empty_(model: nn.Module, device: torch.device) -> None:
    """Gives a model of the meta device memory on a device; buffers keep their values."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def load_weights_(model: CausalPolicy | Critic, path: str, world: World, *, seed: int = 0) -> None:
    """Fills a sharded model on its device from the weights of `path` (`open_weights`); rank 0 reads, all receive.

    Adapters start anew, with the seed, those of PiSSA at zero (adapter_start.py goes on). A critic's head that is not
    there, as in a causal language model, is zero: all values start at 0, on every run.

    Raises UserError, on all ranks, when a tensor is missing, has another shape, or holds NaN or infinity.
    """
    reader = world.agree(lambda: open_weights(path) if world.rank == 0 else None)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if is_adapter(name):
            begins_there = name.endswith(FACTORS[0]) and name.replace(FACTORS[0], START[0]) not in parameters
            start = initial_factor(name, parameter.shape, seed=seed) if begins_there else torch.zeros(parameter.shape)
            put_(parameter, start.to(world.device))
            continue
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=world.device)
        problem = world.agree(lambda name=name, full=full: read_weight_(reader, full, name) if reader else None)
        assert problem is None
        if world.size > 1:
            torch.distributed.broadcast(full, src=0)
        put_(parameter, full)


@torch.no_grad()
def put_(parameter: Tensor, whole: Tensor) -> None:
    """Copies a whole tensor, which every rank holds, into this rank's part of a parameter."""
    if isinstance(parameter, DTensor):
        # src_data_rank=None: every rank cuts out its own shard.
        shard = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(shard.to_local())
    else:
        parameter.copy_(whole)


def read_weight_(folder: SafetensorsFolder | ShardsFolder | AdaptedFolder, out: Tensor, name: str) -> None:
    """Copies a tensor over `out`, cast to its dtype; zeros where a value head (score.*) is not there.

    Raises UserError when it is missing, has another shape, or holds NaN or infinity.
    """
    if name not in folder.files and name.startswith("score."):
        out.zero_()
        return
    if name not in folder.files:
        raise UserError(
            f"the model's weights lack {name}; {folder.path}; found {len(folder.files)} tensors without it; "
            "download or save the model again"
        )
    tensor = folder.read(name)
    if tensor.shape != out.shape:
        raise UserError(
            f"a weight's shape differs from config.json; {name} in {folder.path}; found {tuple(tensor.shape)}, "
            f"expected {tuple(out.shape)}; use the config.json that belongs to these weights"
        )
    is_widened = tensor.dtype.itemsize < out.dtype.itemsize
    # From a host to a GPU `copy_` casts on the host: so what is to become wider travels as it is, and is cast there.
    out.copy_(tensor.to(out.device) if is_widened else tensor)
    if not bool(torch.isfinite(out).all()):
        raise UserError(
            f"the model's weights hold NaN or infinity; {name} in {folder.path}; found "
            f"{int((~torch.isfinite(out)).sum())} such values; use weights that were saved whole"
        )
