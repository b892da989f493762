"""Processes that run the user's code: begun behind a keeper, talked to, ended with all that they started."""

from lib.rooms import exports

__all__, __getattr__ = exports(__name__, pool="WorkerPool", process="WorkerProcess")
