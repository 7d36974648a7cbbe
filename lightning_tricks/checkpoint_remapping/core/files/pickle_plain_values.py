"""The instructions of a pickle that make plain values and fill the memo: most of a file, executed in one loop."""

from __future__ import annotations

import io
import struct
import sys
from typing import IO, Any

from lightning_tricks._shared.read_budget import Budget

WINDOW = 1 << 14  # bytes of the stream that are executed before they are charged: they make a few hundred KiB at most
_LONGEST = 9  # bytes of the longest of these instructions, strings apart
_INT32, _UINT32, _FLOAT64 = struct.Struct("<i"), struct.Struct("<I"), struct.Struct(">d")


class Window:
    """A stream of which the next bytes are at hand."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.data = b""
        self.position = 0

    def fill(self) -> None:
        """Have at least the longest instruction at hand, unless the stream ends."""
        if len(self.data) - self.position < _LONGEST:
            self.data = self.data[self.position :] + self.stream.read(WINDOW)
            self.position = 0

    def read(self, size: int) -> bytes:
        """Return the next bytes, fewer where the stream ends."""
        start, self.position = self.position, self.position + size
        found = self.data[start : self.position]
        if len(found) < size:
            found += self.stream.read(size - len(found))
            self.data, self.position = b"", 0
        return found

    def readline(self) -> bytes:
        """Return the bytes up to the end of the line."""
        end = self.data.find(b"\n", self.position)
        if end >= 0:
            return self.read(end + 1 - self.position)
        return self.read(len(self.data) - self.position) + self.stream.readline()

    def give_back(self) -> None:
        """Set the stream to the byte after those that were read from here."""
        self.stream.seek(self.position - len(self.data), io.SEEK_CUR)


def run_plain_values(window: Window, stack: list[Any], marks: list[int], memo: dict[int, Any], budget: Budget) -> None:
    """Execute the instructions at hand up to the first that does more than make a plain value or use the memo.

    They cost no less than one by one, and are charged together. This is one loop without calls, as each of a million
    values passes through it; the order of the branches is that of their frequency.
    """
    window.fill()
    data, position = window.data, window.position
    push, int32, uint32, float64 = stack.append, _INT32.unpack_from, _UINT32.unpack_from, _FLOAT64.unpack_from
    length = len(data)
    last, cost = length - _LONGEST, 0
    while position <= last:
        code = data[position]
        if code == 0x4A:  # BININT
            push(int32(data, position + 1)[0])
            position += 5
            cost += 48
        elif code == 0x4B:  # BININT1: there is one of each small number
            push(data[position + 1])
            position += 2
            cost += 16
        elif code == 0x4D:  # BININT2
            push(data[position + 1] | data[position + 2] << 8)
            position += 3
            cost += 44
        elif code == 0x47:  # BINFLOAT
            push(float64(data, position + 1)[0])
            position += 9
            cost += 40
        elif code == 0x71:  # BINPUT
            memo[data[position + 1]] = stack[-1]
            position += 2
            cost += 96
        elif code == 0x72:  # LONG_BINPUT
            memo[uint32(data, position + 1)[0]] = stack[-1]
            position += 5
            cost += 96
        elif code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
            position += 1
            cost += 96
        elif code == 0x58 or code == 0x8C:  # BINUNICODE, SHORT_BINUNICODE
            start = position + (5 if code == 0x58 else 2)
            end = start + (uint32(data, position + 1)[0] if code == 0x58 else data[position + 1])
            if end > length:
                break
            text = str(data[start:end], "utf-8", "surrogatepass")
            push(text)
            position = end
            cost += 16 + sys.getsizeof(text)
        elif code == 0x68:  # BINGET
            push(memo[data[position + 1]])
            position += 2
            cost += 16
        elif code == 0x6A:  # LONG_BINGET
            push(memo[uint32(data, position + 1)[0]])
            position += 5
            cost += 16
        elif code == 0x28:  # MARK
            marks.append(len(stack))
            position += 1
            cost += 64
        elif code == 0x7D:  # EMPTY_DICT
            push({})
            position += 1
            cost += 96
        elif code == 0x86 and len(stack) > 1:  # TUPLE2
            stack[-2:] = ((stack[-2], stack[-1]),)
            position += 1
            cost += 64
        elif code in _CONSTANTS:
            push(_CONSTANTS[code])
            position += 1
            cost += 16
        else:
            break
    window.position = position
    budget.spend(cost)


_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False, 0x29: ()}
