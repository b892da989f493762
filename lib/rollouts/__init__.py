"""A step's scored responses: collected, saved, and those of a validation."""

from lib.rooms import exports

__all__, __getattr__ = exports(
    __name__,
    collector="Collected Collector",
    saved_rollouts="save_rollouts",
    validation="EvalConfig evaluate",
)
