"""Values as bytes, for pipes whose other end is not trusted: JSON with tags, no code.

``encode`` keeps the types of plain Python data (tuples, sets, dictionaries with any keys, complex numbers, bytes, ints
of any size, infinite floats). A subclass is sent as its plain base, so that no method of its own travels. Any other
object becomes a reference (if the caller keeps objects) or ``Opaque``, which equals nothing.

This file and inside.py also run as one text inside the sandbox, so they import the standard library only.
"""

import json

MAX_DEPTH = 60
MAX_ITEMS = 200_000


class BadValue(ValueError):
    """Bytes that are no value, or a value too deep or too large to be sent."""


class Opaque:
    """An object of the other side that cannot be sent by value: comparing it, or asking for its truth, is an error."""

    def __init__(self, name):
        self.name = name

    def _refuse(self, *_):
        raise TypeError(f"an object of type {self.name} has no plain value")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = _refuse


def encode(value, keep=None):
    """``value`` as bytes. ``keep(object)`` returns a number by which the other side may name an object."""
    budget = [MAX_ITEMS]
    try:
        return json.dumps(_tagged(value, keep, MAX_DEPTH, budget), allow_nan=False).encode()
    except RecursionError as error:
        raise BadValue("the value is nested too deeply") from error


def decode(data, find=None):
    """The value of bytes. ``find(number)`` returns what stands for an object of the other side."""
    try:
        return _untagged(json.loads(data), find, MAX_DEPTH)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise BadValue(f"no value: {type(error).__name__}") from error


def _tagged(value, keep, depth, budget):
    budget[0] -= 1
    if depth < 0 or budget[0] < 0:
        raise BadValue("the value is nested too deeply or too large")

    def inner(items):
        return [_tagged(item, keep, depth - 1, budget) for item in items]

    kind = type(value)
    if value is None or kind is bool:
        return value
    if issubclass(kind, str):
        return str.__str__(value) if kind is not str else value
    if issubclass(kind, int):
        return ["i", int.__format__(value, "x")]
    if issubclass(kind, float):
        return ["f", float.hex(value)]
    if issubclass(kind, complex):
        return ["c", float.hex(complex(value).real), float.hex(complex(value).imag)]
    if issubclass(kind, (bytes, bytearray)):
        return ["b" if issubclass(kind, bytes) else "a", bytes(value).hex()]
    for tag, base in (("l", list), ("t", tuple), ("s", set), ("z", frozenset)):
        if issubclass(kind, base):
            return [tag, inner(base.__iter__(value))]
    if issubclass(kind, dict):
        return ["d", [inner(pair) for pair in dict.items(value)]]
    if keep is not None:
        return ["r", keep(value)]
    return ["o", str(kind.__name__)[:80]]


def _untagged(item, find, depth):
    if depth < 0:
        raise BadValue("too deep")
    if item is None or isinstance(item, (bool, str)):
        return item
    tag, content = item[0], item[1]
    if tag == "i":
        return int(content, 16)
    if tag == "f":
        return float.fromhex(content)
    if tag == "c":
        return complex(float.fromhex(content), float.fromhex(item[2]))
    if tag == "b":
        return bytes.fromhex(content)
    if tag == "a":
        return bytearray.fromhex(content)
    if tag == "o":
        return Opaque(str(content)[:80])
    if tag == "r":
        return find(content)
    if tag == "d":
        return {_untagged(k, find, depth - 1): _untagged(v, find, depth - 1) for k, v in content}
    return {"l": list, "t": tuple, "s": set, "z": frozenset}[tag](_untagged(one, find, depth - 1) for one in content)
