"""What the machine code of a kernel says about its speed: figures that are found by what the code does, not by where it stands."""

from functools import cached_property

import order
from sass import Code, count
from warp import Simulator

# Warps that multiply on a quarter of a multiprocessor, of one block: one of each warpgroup.
PRODUCT_WARPS = 2
# Warps that finish a tile.
TILE_WARPS = 4
ROUNDS = 12
# What only who acquires a unit does.
ACQUIRE = "FENCE.VIEW"


class Product:
    """A product of warpgroups, where each of a tile's warps finishes so many rows, one behind the other."""

    def __init__(self, code, defines, warp_rows, assumed):
        self.code, self.warp_rows = code, warp_rows
        self.simulator = Simulator(assumed)
        # Where loads find again what another row has loaded.
        self.again = Simulator(assumed, assumed.l1)
        self.epilogue = defines["EPILOGUE"]
        rows = int(defines["ROWS"])
        # Rows of a warp whose outputs are made together.
        self.rows_at_once = min(order.finish_rows(rows) // TILE_WARPS, order.most_at_once(rows))
        # Most units find their inputs staged. A round has one of them or two, which begin alike, and acquires as many.
        self.round = code.round("HGMMA", ACQUIRE)
        self.units = count(self.round, "WARPGROUP.ARRIVE")

    @cached_property
    def unit_instructions(self):
        return len(self.round) // self.units

    @cached_property
    def unit_clocks(self):
        """Of a unit of both tiles."""
        return self.simulator.all_warps(self.round, PRODUCT_WARPS) / self.units

    @cached_property
    def finish_clocks(self):
        """To make outputs of a tile's sums."""
        # The loop that adds parts, which come four floats at a load: a tile's own goes past every register of its sums.
        # Sums are left in shared memory; who counts parts does not.
        loop = self.code.loop("LDG.E.128", "LDS", "STS", "STG", without=("HGMMA", "ATOM"))
        if not loop:
            return 0.0
        body = self.code.shortest(*loop, "STG")
        first = self.simulator.loop(body, PRODUCT_WARPS, ROUNDS)
        # Only these read nothing of the row.
        is_alike = self.epilogue in ("SWIGLU", "HEAD")
        further = self.again.loop(body, PRODUCT_WARPS, ROUNDS) if is_alike else first
        return first + (-(-self.warp_rows // self.rows_at_once) - 1) * further

    @cached_property
    def triggers_late(self):
        """Whether the next kernel is let in by the warp that loads, behind its last unit."""
        return any(set(self.code.find("PREEXIT")) & self.code.reachable(copy) for copy in self.code.find("UBLKCP"))


class Multiply:
    """A product with blocks of a prompt."""

    def __init__(self, code, defines, assumed):
        self.code, self.simulator = code, Simulator(assumed)
        self.product = "QGMMA" if defines["WEIGHT"] == "FP8" else "HGMMA"
        self.round = code.round(self.product, "WARPGROUP.DEPBAR")

    @cached_property
    def unit_instructions(self):
        return len(self.round)

    @cached_property
    def unit_clocks(self):
        """Of a unit of k of both tiles."""
        return self.simulator.all_warps(self.round, PRODUCT_WARPS)

    @cached_property
    def finish_clocks(self):
        """To make outputs of a tile's sums: what stands behind the last wait for products, up to where the next tile begins."""
        first = self.code.find("WARPGROUP.DEPBAR")[-1] + 1
        last = next(index for index in range(first, len(self.code.instructions)) if self.ends_tile(index))
        ends, _ = self.simulator.run(self.code.instructions[first:last], PRODUCT_WARPS, 2)
        return ends[1] - ends[0]

    def ends_tile(self, index):
        target = self.code.target(index)
        return self.code.instructions[index].op.startswith("EXIT") or (target is not None and target < index)


class Attention:
    """One of the two widths."""

    def __init__(self, code, assumed):
        self.code = code
        self.simulator = Simulator(assumed)
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
        warp_rows = -(-rows // TILE_WARPS)
        key = (variant, warp_rows, assumed)
        if key not in self.found:
            self.found[key] = Product(self.code(variant), self.defines(variant), warp_rows, assumed)
        return self.found[key]

    def multiply(self, variant, assumed):
        key = (variant, assumed)
        if key not in self.found:
            self.found[key] = Multiply(self.code(variant), self.defines(variant), assumed)
        return self.found[key]

    def attention(self, variant, assumed):
        key = (variant, assumed)
        if key not in self.found:
            self.found[key] = Attention(self.code(variant), assumed)
        return self.found[key]
