"""Python values as JSON and tensors, and back: what a checkpoint keeps of a user's `state_dict`. Nothing is pickled."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

KIND = "kind"


def encode(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """`value` as JSON; its tensors and arrays go into `tensors` under names that start with `path`.

    Raises ValueError, with the place in the value, for what is neither numbers, strings, bytes, tensors, arrays, nor
    lists, tuples, sets and mappings of them.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        tensors[path] = torch.from_numpy(np.array(value))
        return {KIND: "array"}
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().clone().contiguous()
        return {KIND: "tensor"}
    if isinstance(value, bytes):
        return {KIND: "bytes", "items": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [encode(item, tensors, f"{path}.{i}") for i, item in enumerate(value)]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {KIND: kind.__name__, "items": encode(list(value), tensors, path)}
    if isinstance(value, Mapping):
        keys, values = encode(list(value), tensors, f"{path}.keys"), encode(list(value.values()), tensors, path)
        return {KIND: "dict", "items": [keys, values]}
    raise ValueError(
        f"a checkpoint cannot hold {path}, of type {type(value).__name__}: a state_dict must be made of numbers, "
        "strings, bytes, tensors, arrays, and lists, tuples, sets and mappings of them"
    )


def decode(value: Any, tensors: Mapping[str, Tensor], path: str) -> Any:
    """The twin of `encode`. An ordered dictionary comes back as an ordinary one, which is ordered too."""
    if isinstance(value, list):
        return [decode(item, tensors, f"{path}.{i}") for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kind, items = value[KIND], value.get("items", [])
    if kind == "tensor":
        return tensors[path]
    if kind == "array":
        return tensors[path].numpy()[()]
    if kind == "bytes":
        return base64.b64decode(items)
    if kind == "dict":
        keys, values = items
        return dict(zip(decode(keys, tensors, f"{path}.keys"), decode(values, tensors, path)))
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(items, tensors, path))
