"""Conversations: what answers a model between its turns, and the ids that this adds."""

from lib.rooms import exports

__all__, __getattr__ = exports(
    __name__, config="TurnsConfig", environment="Call Environment Observation Reply Row tool"
)
