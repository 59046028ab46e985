"""What the machine code of a kernel says about its speed: figures that are found by what the code does, not by where it stands."""

from functools import cached_property

from sass import Code, count
from warp import Simulator

# Warps that multiply on a quarter of a multiprocessor, of one block.
PRODUCT_WARPS = 2
# Warps that multiply.
CONSUMER_WARPS = 8
# Rows that one of a product's warps adds up side by side.
MOST_SUM_ROWS = 4
ROUNDS = 12


class Product:
    """The few-row product, where each of its warps has so many rows, one behind the other."""

    def __init__(self, code, defines, warp_rows, assumed):
        self.code, self.warp_rows = code, warp_rows
        # Rows that a warp adds up side by side.
        self.side_rows = min(int(defines["ROWS"]) // CONSUMER_WARPS, MOST_SUM_ROWS)
        self.simulator = Simulator(assumed.l2, assumed.count, assumed.mma)
        # Where loads find again what another row has loaded.
        self.again = Simulator(assumed.l1, assumed.count, assumed.mma)
        self.epilogue = defines["EPILOGUE"]
        self.unit_loop = code.loop("HMMA")

    def body(self, loop):
        return self.code.instructions[loop[0]:loop[1] + 1]

    @cached_property
    def unit_instructions(self):
        return len(self.body(self.unit_loop))

    @cached_property
    def unit_clocks(self):
        return self.simulator.loop(self.body(self.unit_loop), PRODUCT_WARPS)

    @cached_property
    def reduction_clocks(self):
        """From barrier to barrier behind the units, where sums go through shared memory and nothing comes from elsewhere."""
        barriers = [index for index in self.code.find("BAR") if index > self.unit_loop[1]]
        pieces = [self.code.instructions[first + 1:last + 1] for first, last in zip(barriers, barriers[1:])]
        sums = [piece for piece in pieces if count(piece, "STS") and not count(piece, "LDG") and not count(piece, "EXIT")]
        # Half of the warps are at it at a time.
        return sum(self.simulator.line(piece, PRODUCT_WARPS, share=2) for piece in sums)

    @cached_property
    def sum_round(self):
        """Parts that are added up together, clocks of a part, and of the loads of them all."""
        loop = self.code.loop("LDG", "FADD", without=("HMMA", "STS", "STG"))
        if not loop:
            return 1, 0.0, 0.0
        body = self.body(loop)
        together = max(1, count(body, "LDG") // (2 * self.side_rows))
        load = self.simulator.latency("LDG.E")
        return together, max(0.0, self.simulator.loop(body, PRODUCT_WARPS, ROUNDS) - load) / together, load

    def sum_clocks(self, parts):
        """To add up the parts of a tile."""
        together, of_part, load = self.sum_round
        rounds = -(-self.warp_rows // self.side_rows)
        return rounds * (parts * of_part + -(-parts // together) * load)

    @cached_property
    def finish_clocks(self):
        """To make outputs of a tile's sums."""
        loop = self.code.loop("LDG", "LDS", "STG", without=("HMMA",))
        if not loop:
            return 0.0
        body = self.body(loop)
        if self.epilogue == "QKV":
            # Queries, keys and values go their own ways.
            body = self.code.shortest(*loop, "STG")
        first = self.simulator.loop(body, PRODUCT_WARPS, ROUNDS)
        # Only these read nothing of the row.
        is_alike = self.epilogue in ("SWIGLU", "HEAD")
        further = self.again.loop(body, PRODUCT_WARPS, ROUNDS) if is_alike else first
        return first + (self.warp_rows - 1) * further

    @cached_property
    def part_clocks(self):
        """To write a part."""
        loop = self.code.loop("LDS", "FADD", "STG", without=("HMMA", "LDG"))
        if not loop:
            return 0.0
        # The compiler may write several rows a round.
        unrolled = max(1, count(self.body(loop), "STG") // 2)
        return -(-self.warp_rows // unrolled) * self.simulator.loop(self.body(loop), PRODUCT_WARPS, ROUNDS)

    @cached_property
    def triggers_late(self):
        """Whether the next kernel is let in by the warp that loads, behind its last unit."""
        return any(set(self.code.find("PREEXIT")) & self.code.reachable(copy) for copy in self.code.find("UBLKCP"))


class Attention:
    """One of the two widths."""

    def __init__(self, code, assumed):
        self.code = code
        self.simulator = Simulator(assumed.l2, assumed.count, assumed.mma)
        self.page_loop = code.loop("HMMA", "LDGSTS") or code.loop("HMMA")
        # Clocks of a page by warps.
        self.known = {}

    @cached_property
    def page_instructions(self):
        return self.page_loop[1] - self.page_loop[0] + 1

    def page_clocks(self, num_warps):
        """Of a page for each of so many warps on a quarter."""
        if num_warps not in self.known:
            # Most pages hide nothing and move no largest score.
            body = self.code.shortest(*self.page_loop, "LDGSTS")
            self.known[num_warps] = self.simulator.loop(body, num_warps, ROUNDS)
        return self.known[num_warps]


class Kernels:
    """All kernels of a list. Each is read once, and what is found in it is found once for each case of the assumptions."""

    def __init__(self, folder, listed, disassembler):
        self.folder, self.listed, self.disassembler = folder, listed, disassembler
        self.codes, self.found = {}, {}

    def defines(self, variant):
        return self.listed[variant]["defines"]

    def registers(self, variant):
        return self.listed[variant]["registers"]

    def code(self, variant):
        if variant not in self.codes:
            self.codes[variant] = Code.of(self.disassembler, self.folder / self.listed[variant]["file"])
        return self.codes[variant]

    def product(self, variant, rows, assumed):
        # Only how many rows a warp has makes a difference.
        warp_rows = -(-rows // CONSUMER_WARPS)
        key = (variant, warp_rows, assumed)
        if key not in self.found:
            self.found[key] = Product(self.code(variant), self.defines(variant), warp_rows, assumed)
        return self.found[key]

    def attention(self, variant, assumed):
        key = (variant, assumed)
        if key not in self.found:
            self.found[key] = Attention(self.code(variant), assumed)
        return self.found[key]
