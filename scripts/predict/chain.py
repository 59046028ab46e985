"""A chain of kernels on one multiprocessor that has its share of the memory: rings that fill, kernels that begin before the ones
ahead of them have ended, and what happens at each boundary. In clocks."""

import heapq
from typing import NamedTuple


class Kernel(NamedTuple):
    """One kernel's share of a multiprocessor."""

    name: str
    # From the end of the kernel ahead to the first unit, and from the last unit to the end of the grid for the next one.
    before: float
    after: float
    # Units that are streamed, bytes of each from memory and from the L2 cache besides, clocks of each, and of what follows
    # each so many of them.
    units: int = 0
    unit_bytes: int = 0
    unit_l2_bytes: int = 0
    unit_clocks: float = 0
    piece_units: float = 1
    piece_clocks: float = 0
    # Units that the ring holds, and those that are asked for and not there yet at most: while it fills, and after.
    stages: int = 1
    first_under_way: int = 2
    under_way: int = 4
    # Whether the next kernel is let in behind the last unit that is asked for, instead of at the first that is multiplied.
    triggers_late: bool = False
    # Or before the kernel ahead has ended.
    triggers_early: bool = False
    # What a block takes of a multiprocessor.
    shared_bytes: int = 0
    registers: int = 0


class Running:
    """A kernel while it runs."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.start = self.ahead_done = self.at = self.exit = self.done = None
        self.issued = self.released = self.used = 0
        self.arrivals = []
        self.triggered = False


class Chain:
    """Runs kernels; `ends` is when each is done."""

    def __init__(self, kernels, gpu, assumed):
        self.gpu, self.assumed = gpu, assumed
        # Bytes a clock.
        self.share = gpu.bandwidth * assumed.bandwidth / gpu.num_sms / gpu.hertz
        self.running = [Running(kernel) for kernel in kernels]
        self.memory_free = 0.0
        self.events, self.number = [], 0
        self.waiting = set()
        self.running[0].ahead_done = 0.0
        self.push(0.0, self.begin, 0)
        while self.events:
            clock, _, happens, index = heapq.heappop(self.events)
            happens(index, clock)
        self.ends = [one.done for one in self.running]

    def push(self, clock, happens, index):
        self.number += 1
        heapq.heappush(self.events, (clock, self.number, happens, index))

    def fits(self, index):
        """Whether there is room for a kernel: for two of a chain at most, for three where the one in the middle lets the last
        one in early, and only if they fit beside each other."""
        ahead = self.running[max(0, index - 2):index]
        if len(ahead) == 2 and ahead[0].done is None and not ahead[1].kernel.triggers_early:
            return False
        beside = [one.kernel for one in ahead if one.exit is None]
        if not beside:
            return True
        beside.append(self.running[index].kernel)
        return (sum(one.shared_bytes + self.gpu.reserved_bytes for one in beside) <= self.gpu.shared_bytes
                and sum(one.registers for one in beside) <= self.gpu.registers)

    def begin(self, index, clock):
        one = self.running[index]
        if one.start is not None:
            return
        if not self.fits(index):
            self.waiting.add(index)
            return
        one.start = clock
        self.issue(index, clock)
        if one.kernel.triggers_early:
            self.trigger(index, clock)
        if one.ahead_done is not None:
            self.push(max(clock, one.ahead_done) + one.kernel.before, self.go_on, index)

    def serve(self, kernel):
        """Clocks of a unit: all of it comes through the L2 cache."""
        every = kernel.unit_bytes + kernel.unit_l2_bytes
        return max(kernel.unit_bytes / self.share, every / self.assumed.l2_rate)

    def issue(self, index, clock):
        """Asks for units as long as the ring has room."""
        one = self.running[index]
        while one.start is not None and one.issued < one.kernel.units:
            under_way = one.kernel.first_under_way if one.issued < one.kernel.stages else one.kernel.under_way
            if one.issued - one.released >= one.kernel.stages or one.issued - len(one.arrivals) >= under_way:
                return
            self.memory_free = max(self.memory_free, clock) + self.serve(one.kernel)
            one.issued += 1
            self.push(max(self.memory_free, clock + self.assumed.memory), self.land, index)
            if one.kernel.triggers_late and one.issued == one.kernel.units:
                self.trigger(index, clock)

    def trigger(self, index, clock):
        if not self.running[index].triggered and index + 1 < len(self.running):
            self.running[index].triggered = True
            self.push(clock + self.assumed.launch, self.begin, index + 1)

    def land(self, index, clock):
        self.running[index].arrivals.append(clock)
        self.issue(index, clock)
        self.multiply(index)

    def go_on(self, index, clock):
        """The kernel ahead has ended, and its results are staged."""
        one = self.running[index]
        if one.at is None:
            one.at = clock
            if not one.kernel.triggers_late or one.kernel.units == 0:
                self.trigger(index, clock)
            self.multiply(index)

    def multiply(self, index):
        one, kernel = self.running[index], self.running[index].kernel
        if one.at is None or one.exit is not None:
            return
        while one.used < len(one.arrivals):
            end = max(one.at, one.arrivals[one.used]) + kernel.unit_clocks
            one.used += 1
            is_piece = int(one.used / kernel.piece_units) > int((one.used - 1) / kernel.piece_units)
            one.at = end + (kernel.piece_clocks if is_piece else 0)
            self.push(end, self.release, index)
        if one.used == kernel.units:
            one.exit = one.at
            self.push(one.exit, self.leave, index)
            self.push(one.exit + kernel.after, self.end, index)

    def release(self, index, clock):
        self.running[index].released += 1
        self.issue(index, clock)

    def leave(self, index, clock):
        self.let_in(clock)

    def end(self, index, clock):
        self.running[index].done = clock
        if index + 1 < len(self.running):
            following = self.running[index + 1]
            following.ahead_done = clock
            self.trigger(index, clock)
            if following.start is not None:
                self.push(clock + following.kernel.before, self.go_on, index + 1)
        self.let_in(clock)

    def let_in(self, clock):
        for index in sorted(self.waiting):
            if self.fits(index):
                self.waiting.discard(index)
                self.begin(index, clock)
