"""The learning rate over a run's steps: torch's own schedulers, and a last step that still trains."""

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from lib.model.optim import OptimConfig, lr_factor

LR = 0.5


@pytest.mark.parametrize("min_lr_ratio", [0.0, 0.3])
@pytest.mark.parametrize("num_steps", [1, 2, 7, 50])
@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_schedule_is_torchs_and_would_reach_its_end_one_step_after_the_last(schedule, num_steps, min_lr_ratio):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    if schedule == "cosine":
        theirs = CosineAnnealingLR(optimizer, T_max=num_steps, eta_min=LR * min_lr_ratio)
    else:
        theirs = LinearLR(optimizer, start_factor=1.0, end_factor=min_lr_ratio, total_iters=num_steps)
    cfg = OptimConfig(lr=LR, schedule=schedule, min_lr_ratio=min_lr_ratio)
    for step in range(num_steps):
        assert LR * lr_factor(step, cfg, num_steps) == pytest.approx(theirs.get_last_lr()[0])
        assert lr_factor(step, cfg, num_steps) > min_lr_ratio, "every step trains"
        optimizer.step()
        theirs.step()
    for step in (num_steps, num_steps + 9):
        assert lr_factor(step, cfg, num_steps) == pytest.approx(min_lr_ratio)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_a_schedule_begins_after_the_warm_up_and_every_step_trains(schedule):
    cfg = OptimConfig(lr=LR, schedule=schedule, warmup_steps=4)
    rates = [lr_factor(step, cfg, 10) for step in range(10)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1, 1] and min(rates) > 0
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert [lr_factor(step, cfg, 3) for step in range(3)] == [0.25, 0.5, 0.75]  # a run shorter than its warm-up
