# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PLC0415
"""Calls of a Python function in another process. This text is part of both programs: everything lives in one class."""

from collections.abc import Callable
from typing import Any


class SporeloomRpc:
    """Frames of a length and JSON; what JSON does not know is a list that begins with a tag."""

    INPUT, OUTPUT, MAX_BYTES = 3, 4, 1 << 26

    def __init__(self) -> None:
        import collections.abc
        import decimal
        import fractions
        import json
        import os
        import sys

        self.abc, self.json, self.os = collections.abc, json, os
        self.Decimal, self.Fraction = decimal.Decimal, fractions.Fraction
        self.numpy: Any = sys.modules.get("numpy")

    def encode(self, value: Any) -> Any:
        """Plain data of a result or an argument; what a class of the solution's own adds to it is left out."""
        if value is None or value is True or value is False:
            return value
        if self.numpy is not None and isinstance(value, self.numpy.generic):
            value = value.item()
        if self.numpy is not None and isinstance(value, self.numpy.ndarray):
            return ["array", str(value.dtype), [self.encode(v) for v in value.tolist()]]
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, int):
            return ["int", format(int.__index__(value), "x")]
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, (bytes, bytearray)):
            return ["bytes" if isinstance(value, bytes) else "bytearray", value.hex()]
        if isinstance(value, dict):
            return ["dict", [[self.encode(k), self.encode(v)] for k, v in dict.items(value)]]
        if isinstance(value, range):
            return ["range", value.start, value.stop, value.step]
        if isinstance(value, (self.Decimal, self.Fraction)):
            return [type(value).__name__, str(value)]
        kinds: tuple[tuple[str, Any], ...] = (
            ("list", list),
            ("tuple", tuple),
            ("frozenset", frozenset),
            ("set", self.abc.Set),
            ("iterator", self.abc.Iterator),
        )
        for name, kind in kinds:
            if isinstance(value, kind):
                return [name, [self.encode(v) for v in value]]
        raise TypeError(f"a {type(value).__name__} cannot be passed on")

    def decode(self, data: Any) -> Any:
        """A value of the other side's. NaN is none: `if abs(a - b) > 1e-4: fail` would be passed."""
        value = self._decoded(data)
        is_array = self.numpy is not None and isinstance(value, self.numpy.ndarray)
        if (value != value).any() if is_array else value != value:
            raise ValueError("NaN is not an answer")
        return value

    def _decoded(self, data: Any) -> Any:
        if isinstance(data, dict):
            raise ValueError("this is not a value")
        if not isinstance(data, list):
            return data
        kind, *values = data
        if kind == "int":
            return int(values[0], 16)
        if kind == "dict":
            return {self.decode(k): self.decode(v) for k, v in values[0]}
        if kind in ("list", "tuple", "set", "frozenset"):
            return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(self.decode, values[0]))
        if kind == "iterator":
            return iter([self.decode(v) for v in values[0]])
        if kind == "complex":
            return complex(*map(float, values))
        if kind in ("bytes", "bytearray"):
            return (bytes if kind == "bytes" else bytearray).fromhex(values[0])
        if kind == "range":
            return range(*map(int, values))
        if kind in ("Decimal", "Fraction"):
            return (self.Decimal if kind == "Decimal" else self.Fraction)(str(values[0]))
        if kind == "array":
            import numpy

            self.numpy = numpy
            return numpy.array([self.decode(v) for v in values[1]], dtype=str(values[0]))
        raise ValueError("this is not a value")

    def send(self, data: Any) -> None:
        payload = self.json.dumps(data).encode()
        payload = len(payload).to_bytes(8, "big") + payload
        while payload:
            payload = payload[self.os.write(self.OUTPUT, payload) :]

    def receive(self) -> Any:
        """The next frame; None once the other side has gone."""
        head = self._read(8)
        if head is None:
            return None
        size = int.from_bytes(head, "big")
        if size > self.MAX_BYTES:
            raise ValueError("a value is too large")
        payload = self._read(size)
        return None if payload is None else self.json.loads(payload)

    def _read(self, size: int) -> bytes | None:
        found = b""
        while len(found) < size:
            chunk = self.os.read(self.INPUT, size - len(found))
            if not chunk:
                return None
            found += chunk
        return found

    def function(self, name: str) -> Callable[..., Any]:
        """Stands for the solution's function in the tests."""

        def call(*arguments: Any, **named: Any) -> Any:
            self.send([name, self.encode(arguments), self.encode(named)])
            answer = self.receive()
            if answer is None:
                raise AssertionError("the solution ended before it answered")
            kind, value = answer
            if kind != "result":
                raise AssertionError(f"the solution failed: {value}")
            return self.decode(value)

        return call

    def serve(self, **functions: Callable[..., Any]) -> None:
        """Answer calls until the tests end."""
        import sys
        import traceback

        while (request := self.receive()) is not None:
            name, arguments, named = request
            try:
                answer = ["result", self.encode(functions[name](*self.decode(arguments), **self.decode(named)))]
            except Exception as error:
                traceback.print_exc()
                answer = ["failure", f"{type(error).__name__}: {error}"]
            sys.stdout.flush()
            self.send(answer)

    def finish(self) -> None:
        """The last thing the tests do."""
        import sys

        print(f"\n{self.os.environ['SPORELOOM_NONCE']}", file=sys.stderr, flush=True)
