"""The data that travels between the phases, and the legend of every tensor's shape.

    B  responses (rows) on this rank        b  rows of one micro-batch
    T  longest response among those rows    N  tokens of a packed micro-batch (prompts and responses, no padding)
    L  longest prompt + response            V  vocabulary        H  hidden size

Rows are right-padded matrices of numbers per response token; the model itself only ever sees packed tokens.
"""

from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt of the stream: a dataset row, tokenised."""

    uid: int
    """Position in the endless seeded prompt stream. Groups are keyed by it."""
    prompt_ids: list[int]
    data_source: str
    ground_truth: Any
    extra_info: dict
    place: int = -1
    """Which of its split's prompts it is, in file order; -1: of none."""
    messages: list[dict] = field(default_factory=list)
    """What `prompt_ids` were made of."""
    agent_name: str | None = None
    """The row's, which verl's conversations choose by; None: it has none."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """What the reward function said about one response."""

    score: float | None
    """None: the function failed or declined; the response is excluded from training, never counted as 0."""
    extras: dict[str, float | str | bool] = field(default_factory=dict)
    """The other keys that the reward function returned: acc, pred, format..."""
    error: str | None = None
    """Why there is no score: the exception's text, or the time limit."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One response, exactly as the engine produced it."""

    sample: Sample
    index: int
    """Place in its group, 0 to n - 1."""
    response_ids: list[int]
    """All ids after the prompt: sampled ones, with the end-of-sequence ids when there are some, and observed ones."""
    rollout_log_probs: list[float] | None
    """As the engine reported them, per response token, 0 where it was observed; None with --rollout.log-probs False."""
    finish_reason: str
    """`stop` (an end-of-sequence id or stop string, or the environment's word), `length` (the limit of tokens), `turns`
    (that of turns), `error` (the environment's; without a score); of partial rollouts `unfinished`, in conversations
    `waiting` or `ending`, as lib/engine/conversations.py says."""
    score: Score | None = None
    greedy_score: float | None = None
    """Score of a greedy response to the same prompt, where the algorithm asks for one."""
    num_stale: int = 0
    """Tokens at the start that an older policy sampled; their rollout_log_probs are that policy's."""
    num_continued: int = 0
    """Steps in which it went on after its first (partial rollouts)."""
    spans: list[int] = field(default_factory=list)
    """Lengths of what was sampled and what was observed, in turn, sampled first; none: all of it was sampled."""
    observed: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """(turn that followed, 0 for the first; a message of the environment), in order: what was observed, in words."""
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    """(place in response_ids of a turn's last sampled token, what the environment gave for that turn)."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Sums over its turns: tool calls, what went wrong with them, what the environment measured."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """Of each turn that was answered: `calls` (name, arguments, error) and the answer's `seconds`, for people; where
    classes of verl's shapes gave some, `tool_rewards` and `turn_scores`, for the reward function."""

    def given(self, name: str) -> list[float]:
        """All its `tool_rewards` or `turn_scores`, in order."""
        return [value for answer in self.answers for value in answer.get(name, ())]

    @property
    def is_truncated(self) -> bool:
        """Whether a limit ended it."""
        return self.finish_reason in ("length", "turns")

    @property
    def is_partial(self) -> bool:
        """Whether the next step goes on with it."""
        return self.finish_reason in ("unfinished", "waiting", "ending")

    @property
    def is_sampled(self) -> list[bool]:
        """Per response token, whether the policy chose it."""
        spans = self.spans or [len(self.response_ids)]
        assert sum(spans) == len(self.response_ids), f"spans of {sum(spans)} of {len(self.response_ids)} tokens"
        return [place % 2 == 0 for place, length in enumerate(spans) for _ in range(length)]

    @property
    def sampled_ids(self) -> list[int]:
        """What the policy chose."""
        return [token for turn in self.sampled_turns for token in turn]

    @property
    def sampled_turns(self) -> list[list[int]]:
        """The same, turn by turn."""
        ends = [0, *accumulate(self.spans or [len(self.response_ids)])]
        return [self.response_ids[begin:end] for begin, end in list(pairwise(ends))[::2]]

    @property
    def num_turns(self) -> int:
        """As verl counts: the prompt, the model's turns, what was observed between them; so two for each of its turns.

        All messages of a prompt, and of an answer, count as one.
        """
        return 2 * len(self.sampled_turns)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """This rank's rows of a step, or of a mini- or micro-batch. All tensors share their first dimension."""

    uids: Tensor  # (B,) int64, the group key
    indices: Tensor  # (B,) int64, place in the group
    mini_batch_ids: Tensor  # (B,) int64, which optimizer step of an epoch uses the row
    input_ids: Tensor  # (B, L) int64, prompt then response, right-padded with 0
    prompt_lens: Tensor  # (B,) int64
    response_lens: Tensor  # (B,) int64, all tokens after the prompt
    response_mask: Tensor  # (B, T) bool, True where the policy chose the token; all False for an excluded response
    truncated: Tensor  # (B,) bool, a limit ended it
    valid: Tensor  # (B,) bool, False: excluded (no score)
    scores: Tensor  # (B,) float32, 0 without a score
    named_rewards: Tensor | None = None  # (B, K) float32, by the advantage's reward_keys; 0 without a score
    sampled_lens: Tensor | None = None  # (B,) int64, tokens that the policy chose; None: all of response_lens
    turn_rewards: Tensor | None = None  # (B, T) float32, an environment's, on the last token sampled in a turn
    num_stale: Tensor | None = None  # (B,) int64, response tokens at the start that an older policy sampled; None: 0
    greedy_scores: Tensor | None = None  # (B,) float32, of the prompt's greedy response (ReMax)
    token_level_rewards: Tensor | None = None  # (B, T) float32, the score on the last token, less penalties
    rollout_log_probs: Tensor | None = None  # (B, T) float32
    old_log_probs: Tensor | None = None  # (B, T) float32, the trainer's, before the update; None: equal to the current
    ref_log_probs: Tensor | None = None  # (B, T) float32
    logit_grad_squared: Tensor | None = None  # (B, T) float32, |d log p / d logits|^2 of the policy before the update
    values: Tensor | None = None  # (B, T) float32, the critic's, of the state before each token
    is_weights: Tensor | None = None  # (B, T) float32, importance weights of the rollout correction; None: all 1
    selected: Tensor | None = None  # (B, T) bool, the tokens that a loss chose over the whole mini-batch
    advantages: Tensor | None = None  # (B, T) float32, 0 outside response_mask
    returns: Tensor | None = None  # (B, T) float32

    def __len__(self) -> int:
        return self.uids.shape[0]

    @property
    def total_lens(self) -> Tensor:
        """(B,) tokens of prompt and response."""
        return self.prompt_lens + self.response_lens

    @property
    def num_sampled(self) -> Tensor:
        """(B,) int64, response tokens that the policy chose, also of excluded rows."""
        return self.response_lens if self.sampled_lens is None else self.sampled_lens

    @property
    def stale(self) -> Tensor:
        """(B, T) bool, True where an older policy sampled the token."""
        if self.num_stale is None:
            return torch.zeros_like(self.response_mask)
        return torch.arange(self.response_mask.shape[1], device=self.num_stale.device) < self.num_stale[:, None]

    def with_(self, **tensors: Tensor | None) -> "Batch":
        """A copy with some tensors replaced."""
        return replace(self, **tensors)

    def rows(self, rows: Tensor) -> "Batch":
        """The given rows (int64 indices), in that order, padded only as far as these rows need."""
        longest_response = int(self.response_lens[rows].max()) if len(rows) else 0
        longest_total = int(self.total_lens[rows].max()) if len(rows) else 0
        width = {"input_ids": longest_total}
        picked = {}
        for name, tensor in vars(self).items():
            if tensor is None:
                picked[name] = None
            elif tensor.dim() == 1 or name == "named_rewards":
                picked[name] = tensor[rows]
            else:
                picked[name] = tensor[rows, : width.get(name, longest_response)]
        return Batch(**picked)

    def to(self, device: torch.device) -> "Batch":
        """A copy on another device; as `to_device`."""
        return Batch(**{k: None if v is None else to_device(v, device) for k, v in vars(self).items()})


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, for which the host does not wait.

    From ordinary memory CUDA copies more than 64 KiB only after all earlier work of the stream, and the host stands
    until then (CUDA Runtime API, "API synchronization behavior").
    """
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
