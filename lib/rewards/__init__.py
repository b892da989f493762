"""Graders, one file each, and what runs them and yours: worker processes, time limits, counted failures."""

from lib.rooms import exports

__all__, __getattr__ = exports(
    __name__,
    scoring="GRADERS RewardConfig Scorer",
    trial="check_reward",
)
