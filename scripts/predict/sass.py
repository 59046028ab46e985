"""Machine code with what the assembler says to the hardware: how long to stall, which scoreboards to set and to wait for."""

import re
import subprocess
from collections import deque
from typing import NamedTuple

# The second word of an instruction ends with its control bits.
CONTROL_SHIFT = 41
# A field of three bits that names none of the six scoreboards.
NO_SCOREBOARD = 7
LABEL = re.compile(r"^(\.L_x_\d+):")
FIRST = re.compile(r"^/\*([0-9a-f]{4,})\*/\s+(.*?);?\s*/\* 0x[0-9a-f]{16} \*/$")
SECOND = re.compile(r"^/\* 0x([0-9a-f]{16}) \*/$")
PREDICATE = re.compile(r"^(@!?U?P\w+)\s+(.*)$")
TARGET = re.compile(r"(\.L_x_\d+)")


class Instruction(NamedTuple):
    """One of a warp."""

    predicate: str
    # Such as `HMMA.16816.F32`.
    op: str
    text: str
    # Clocks before the warp's next instruction.
    stall: int
    # Scoreboard that is set until the result is written; until the operands are read; mask of those that are awaited.
    writes: int
    reads: int
    waits: int


class Code:
    """The instructions of a kernel, in the order of their addresses."""

    def __init__(self, instructions, labels):
        self.instructions, self.labels = instructions, labels

    @staticmethod
    def of(disassembler, cubin):
        """Of a file."""
        done = subprocess.run([disassembler, "-c", "-hex", cubin], capture_output=True, text=True, check=True)
        return Code.parse(done.stdout)

    @staticmethod
    def parse(listing):
        """Of what `nvdisasm -c -hex` prints."""
        instructions, labels, text = [], {}, None
        for line in map(str.strip, listing.splitlines()):
            if label := LABEL.match(line):
                labels[label[1]] = len(instructions)
            elif first := FIRST.match(line):
                text = first[2].rstrip("; ")
            elif text and (second := SECOND.match(line)):
                instructions.append(decoded(text, int(second[1], 16) >> CONTROL_SHIFT))
                text = None
        if not instructions:
            raise ValueError("there are no instructions in what the disassembler prints")
        return Code(instructions, labels)

    def target(self, index):
        """Where a branch goes; None of what is none."""
        instruction = self.instructions[index]
        found = TARGET.search(instruction.text) if instruction.op.startswith("BRA") else None
        return self.labels.get(found[1]) if found else None

    def loops(self):
        """First and last instruction of each, the shortest first."""
        backward = [(target, index) for index in range(len(self.instructions))
                    if (target := self.target(index)) is not None and target <= index]
        return sorted(set(backward), key=lambda loop: loop[1] - loop[0])

    def loop(self, *ops, without=()):
        """The shortest loop that has all of these operations and none of those; None where there is none."""
        for first, last in self.loops():
            body = self.instructions[first:last + 1]
            if all(count(body, op) for op in ops) and not any(count(body, op) for op in without):
                return first, last
        return None

    def following(self, index):
        """Indices of what may run right after an instruction."""
        instruction, target = self.instructions[index], self.target(index)
        ends = instruction.op.startswith(("BRA", "EXIT", "RET")) and not is_conditional(instruction)
        falls = [] if ends or index + 1 == len(self.instructions) else [index + 1]
        return falls + ([] if target is None else [target])

    def reachable(self, start):
        """Indices of what may run after an instruction."""
        seen, rest = set(), self.following(start)
        while rest:
            index = rest.pop()
            if index not in seen:
                seen.add(index)
                rest.extend(self.following(index))
        return seen

    def shortest(self, first, last, op, *more):
        """The shortest way through a loop that has an operation, one of several that exclude each other, and as many of each of
        those as the loop has. None where there is none."""
        body = self.instructions[first:last + 1]
        wanted = [(op, 1), *((each, count(body, each)) for each in more)]
        full = tuple(times for _, times in wanted)

        def seen(index, before):
            name = self.instructions[index].op
            return tuple(min(times, had + name.startswith(each)) for (each, times), had in zip(wanted, before))

        start = (first, seen(first, (0,) * len(wanted)))
        ways, rest = {start: None}, deque([start])
        while rest:
            index, had = state = rest.popleft()
            if state == (last, full):
                break
            for following in self.following(index):
                if not first <= following <= last:
                    continue
                after = (following, seen(following, had))
                if after not in ways:
                    ways[after] = state
                    rest.append(after)
        if (last, full) not in ways:
            return None
        way, state = [], (last, full)
        while state is not None:
            way.append(self.instructions[state[0]])
            state = ways[state]
        return way[::-1]

    def round(self, op, *more):
        """The shortest way around that has an operation, and those, by any loop."""
        ways = [self.shortest(*loop, op, *more) for loop in self.loops()]
        return min(filter(None, ways), key=len)

    def find(self, op):
        """Indices of an operation."""
        return [index for index, instruction in enumerate(self.instructions) if instruction.op.startswith(op)]


def is_conditional(instruction):
    """Whether a branch may fall through: it has a predicate before it or among its operands, or is taken by torn warps alone."""
    return bool(instruction.predicate) or instruction.op == "BRA.DIV" or re.match(r"BRA\S*\s+!?U?P\d", instruction.text) is not None


def decoded(text, control):
    predicate = PREDICATE.match(text)
    before, text = (predicate[1], predicate[2]) if predicate else ("", text)
    return Instruction(before, text.split()[0], text, control & 15, control >> 5 & 7, control >> 8 & 7, control >> 11 & 63)


def count(body, op):
    """How many instructions are of an operation."""
    return sum(instruction.op.startswith(op) for instruction in body)
