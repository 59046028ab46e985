"""Clocks of a piece of machine code for the warps of a quarter of a multiprocessor, from its control bits: stalls, scoreboards
and pipes. What a barrier in memory waits for is taken to be there already."""

from typing import NamedTuple

from sass import NO_SCOREBOARD

NUM_SCOREBOARDS = 6
# Clocks until the result of an instruction is there, of those that set a scoreboard. Those of memory are assumptions.
LATENCY = {
    "S2R": 28, "S2UR": 28, "SYNCS": 26, "LDSM": 33, "LDS": 29, "MUFU": 22, "SHFL": 25, "LDC": 30, "STS": 12, "STG": 12, "I2F": 18,
    "F2I": 18, "R2UR": 12, "HMMA": 24, "BAR": 24, "F2F": 20, "LDGSTS": 20,
}
OTHER_LATENCY = 20
# Until the operands of one are read.
READ_LATENCY = 12
# Multiply-adds of halves a clock of a quarter.
QUARTER_MACS = 512
# Of halves, and of e4m3.
WARPGROUP_PRODUCTS = ("HGMMA", "QGMMA")
# Clocks that an instruction keeps a pipe of a quarter busy. The quarters share one for shared memory, so it takes four times
# as long.
ALU = ("F2FP", "SHF", "LOP3", "ISETP", "SEL", "PRMT", "VIADD", "VIMNMX", "LEA", "IADD3", "FMNMX", "FSETP", "PLOP3")
PIPES = [
    (ALU, "alu", 2),
    (("LDSM", "LDS.128", "STS.128"), "shared", 16),
    (("LDS.64", "STS.64"), "shared", 8),
    (("LDS", "STS"), "shared", 4),
    (("MUFU", "SHFL", "I2F", "F2I"), "special", 8),
]


class Takes(NamedTuple):
    """What an operation takes: a pipe, or none, for so long, and clocks until its result is there."""

    pipe: str
    clocks: float
    latency: float


class Warp:
    def __init__(self):
        self.at = self.ready = self.rounds = 0
        # Until the sums of its warpgroup's products are there.
        self.products = 0
        self.boards = [0] * NUM_SCOREBOARDS

    def may_issue(self, instruction, takes, clock, busy):
        if self.ready > clock:
            return False
        if instruction.op.startswith("WARPGROUP.DEPBAR") and self.products > clock:
            return False
        if any(instruction.waits >> board & 1 and self.boards[board] > clock for board in range(NUM_SCOREBOARDS)):
            return False
        return busy.get(takes.pipe, 0) <= clock

    def issue(self, instruction, takes, clock, busy):
        if takes.pipe:
            busy[takes.pipe] = clock + takes.clocks
        until = clock + takes.latency
        if instruction.op.startswith(WARPGROUP_PRODUCTS):
            self.products = until
        if instruction.writes != NO_SCOREBOARD:
            self.boards[instruction.writes] = max(self.boards[instruction.writes], until)
        if instruction.reads != NO_SCOREBOARD:
            self.boards[instruction.reads] = max(self.boards[instruction.reads], clock + READ_LATENCY)
        self.ready = clock + max(1, instruction.stall)
        self.at += 1


class Simulator:
    """Runs code, with what is assumed of memory and of the tensor cores."""

    def __init__(self, assumed, load_clocks=None):
        loads = assumed.l2 if load_clocks is None else load_clocks
        self.memory = {"LDG.": loads, "ATOM": assumed.count, "RED": assumed.count}
        self.assumed = assumed

    def latency(self, op):
        """Clocks until the result of an operation is there."""
        for table in (self.memory, LATENCY):
            for name, clocks in table.items():
                if op.startswith(name):
                    return clocks
        return OTHER_LATENCY

    def takes(self, op):
        if op.startswith("HMMA"):
            return Takes("tensor", self.assumed.mma, self.latency(op))
        if op.startswith(WARPGROUP_PRODUCTS):
            _, columns, depth = map(int, op.split(".")[1].split("x"))
            # As many bytes of k take as long.
            macs = QUARTER_MACS * (2 if op.startswith("QGMMA") else 1)
            clocks = max(self.assumed.wgmma, 16 * columns * depth / macs)
            return Takes("tensor", clocks, clocks + self.assumed.wgmma_latency)
        for ops, pipe, clocks in PIPES:
            if op.startswith(ops):
                return Takes(pipe, clocks, self.latency(op) + (clocks if pipe == "shared" else 0))
        return Takes(None, 0, self.latency(op))

    def run(self, body, num_warps, rounds):
        """Clocks at which the first warp ends each round, and one at which all have ended."""
        warps, busy, clock, last, ends = [Warp() for _ in range(num_warps)], {}, 0, 0, []
        takes = [self.takes(instruction.op) for instruction in body]
        while any(warp.rounds < rounds for warp in warps):
            for step in range(num_warps):
                index = (last + step) % num_warps
                warp = warps[index]
                at = warp.at
                if warp.rounds == rounds or not warp.may_issue(body[at], takes[at], clock, busy):
                    continue
                warp.issue(body[at], takes[at], clock, busy)
                if warp.at == len(body):
                    warp.at, warp.rounds = 0, warp.rounds + 1
                    if index == 0:
                        ends.append(clock)
                last = index
                break
            clock += 1
        return ends, clock

    def all_warps(self, body, num_warps, rounds=40):
        """Clocks of a round of all warps, which need not get as much as each other: as many more rounds take so much more."""
        half = rounds // 2
        return (self.run(body, num_warps, rounds)[1] - self.run(body, num_warps, half)[1]) / (rounds - half)

    def loop(self, body, num_warps, rounds=40):
        """Clocks of a round once it runs evenly."""
        ends, _ = self.run(body, num_warps, rounds)
        half = rounds // 2
        return (ends[-1] - ends[half]) / (rounds - 1 - half)
