"""Cooperative multi-LLM reinforcement learning: helpers of the training scripts beside this package."""

from comlrl.version import __version__

__all__ = ["__version__"]
