"""A published module that is gone; importing its name says what to use."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "DeviceScheduler":
        raise ValueError("comlrl.schedulers.DeviceScheduler is gone: set agent_devices, for example [cuda:0, cuda:1]")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
