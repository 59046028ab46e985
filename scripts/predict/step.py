"""Steps and passes: the operations that an engine would launch, as a chain of kernels, and what they take."""

import statistics
from typing import NamedTuple

import order
from chain import Chain, Kernel

# Positions of a split of the attention, and of a page.
SPLIT_TOKENS = 256
PAGE_TOKENS = 16
# Splits that a level of the tree adds up.
RADIX = 8
ATTENTION_WARPS = 4
QUARTERS = 4
# Layers that are simulated; all others take what these add.
FEW_LAYERS, MORE_LAYERS = 3, 6
F32, F16 = 4, 2
# Parts whose loads are under way together.
PARTS_AT_ONCE = 4
# The ring of a product with blocks of a prompt, and blocks of threads that share rows.
MULTIPLY_RING = 192 << 10
MULTIPLY_CLUSTER = 2
# Of a warp's copy: 16 a lane.
COPY_BYTES = 512


class Seen(NamedTuple):
    """What the rows of a pass see: so many sequences have so many positions before their rows, and rows."""

    sequences: int
    context: int
    rows: int


class Planner:
    """Makes a chain of operations, for one GPU and one case of the assumptions."""

    def __init__(self, kernels, config, gpu, assumed):
        self.kernels, self.config, self.gpu, self.assumed = kernels, config, gpu, assumed

    def kernel(self, operations, index, seen):
        """An operation's share of a multiprocessor."""
        operation = operations[index]
        if "library" in operation:
            return self.library(operation)
        name = operation["variant"].split(".")[0]
        if name == "gemm":
            return self.product(operation)
        if name == "multiply":
            return self.multiply(operation)
        if name == "attention":
            return self.plain(name, self.attention_clocks(operation, seen))
        fixed = {"rows": self.assumed.rows, "sample": self.assumed.sample, "accept": self.assumed.accept}
        around = self.clocks_of(self.bytes_around(name, operations, index))
        return self.plain(name, fixed.get(name, self.assumed.row_kernel) + around)

    def bytes_around(self, name, operations, index):
        """What a kernel before or behind a product with blocks of a prompt reads and writes."""
        following = next(filter(None, map(self.block_shape, operations[index:])), None)
        ahead = next(filter(None, map(self.block_shape, reversed(operations[:index]))), None)
        if name == "unpack":
            _, n, k = following
            element = 1 if operations[index + 1]["library"] == "fp8" else 2
            return n * k * ((1 if self.config["weights"] == "fp8" else 2) + element)
        if name in ("normalise", "quantise") and following:
            m, _, k = following
            return m * k * (F32 if name == "normalise" else F16 + 1)
        if name == "normalise":
            # In front of a product of warpgroups: read and written through the L2 cache alone.
            return 0
        if name in ("finish", "rope") and ahead:
            m, n, _ = ahead
            return m * n * F32
        return 0

    @staticmethod
    def block_shape(operation):
        """Rows, outputs and inputs of a product with blocks of a prompt; none of others."""
        if operation.get("matrix"):
            return [operation["rows"], *operation["matrix"]]
        return operation.get("shape")

    def plain(self, name, clocks):
        return Kernel(name, before=150, after=clocks + self.assumed.release, triggers_early=name == "normalise")

    def product(self, operation):
        assumed, variant = self.assumed, operation["variant"]
        defines = self.kernels.defines(variant)
        n, k, epilogue = int(defines["SHAPE_N"]), int(defines["SHAPE_K"]), defines["EPILOGUE"]
        weight_bytes = 1 if defines["WEIGHT"] == "FP8" else 2
        rows = operation["rows"]
        cut = order.order(n, k, weight_bytes, operation["grid"], epilogue == "HEAD")
        code = self.kernels.product(variant, rows, assumed)
        unit_bytes = order.PAIR_TILES * order.UNIT_BYTES
        # Rows come as halves with their units: where there are many, all multiprocessors ask the L2 cache all the time.
        most_rows = int(defines["ROWS"])
        l2_rate = assumed.l2_rate if most_rows <= order.MOST_COPIED else assumed.l2_shared
        unit_l2_bytes = rows * order.unit_k(weight_bytes) * F16
        before = assumed.copying + unit_l2_bytes / l2_rate
        copy_warps = order.COPY_WARPS if most_rows <= order.FEW_COPIED else order.MANY_COPY_WARPS
        copying = unit_l2_bytes / COPY_BYTES / copy_warps * assumed.copy
        if most_rows > order.MOST_COPIED:
            # Of rows that two blocks share each asks for a half.
            shares = epilogue == "HEAD" or order.shares_rows(n, k, weight_bytes, operation["grid"])
            copying = (unit_bytes + unit_l2_bytes * (assumed.multicast if shares else 1)) / l2_rate
        # Of a part, both tiles.
        part = order.PAIR_TILES * order.UNIT_OUTPUTS * rows * F32 / l2_rate
        batches = order.up(rows, order.finish_rows(most_rows))
        settle = cut.parts * part + assumed.l2 * order.up(cut.parts, PARTS_AT_ONCE) * batches + code.finish_clocks
        # More than two blocks that have parts of a pair settle it together, and claim each batch.
        own = (settle + assumed.count * batches) / cut.parts if cut.parts > 2 else settle
        last = part + assumed.count + own if cut.parts else code.finish_clocks
        # The last piece is settled at the end.
        each = cut.pieces * part + cut.pairs * settle if cut.parts else cut.pieces * code.finish_clocks
        events = max(1.0, cut.pieces)
        stages = min(order.MOST_STAGES, operation["ring_bytes"] // (unit_bytes + self.x_bytes(defines)))
        return Kernel(
            name=product_name(epilogue, n, k), before=before, after=last + assumed.release, units=cut.units,
            unit_bytes=unit_bytes, unit_l2_bytes=unit_l2_bytes, unit_clocks=max(code.unit_clocks, copying), piece_units=cut.units / events,
            piece_clocks=each / events, stages=stages,
            first_under_way=order.FIRST_UNDER_WAY, under_way=order.UNITS_UNDER_WAY,
            triggers_late=code.triggers_late, shared_bytes=operation["shared_bytes"],
            registers=self.kernels.registers(variant) * operation["threads"])

    def multiply(self, operation):
        """Of blocks of a prompt: a block of threads has whole tiles, and all of them share the L2 cache."""
        assumed, variant = self.assumed, operation["variant"]
        defines, code = self.kernels.defines(variant), self.kernels.multiply(variant, assumed)
        (n, k), tile_rows = operation["matrix"], int(defines["ROWS"])
        weight_bytes = 1 if defines["WEIGHT"] == "FP8" else 2
        tiles = order.up(order.up(n, order.UNIT_OUTPUTS), order.PAIR_TILES * MULTIPLY_CLUSTER) * order.up(operation["rows"], tile_rows)
        rounds = order.up(tiles, operation["grid"] // MULTIPLY_CLUSTER)
        k_units = order.up(k, order.unit_k(weight_bytes))
        stage = (order.PAIR_TILES + tile_rows // order.UNIT_OUTPUTS) * order.UNIT_BYTES
        # A block asks for a share of the rows, which come to all of its cluster: the cache is read once for them.
        asked = (order.PAIR_TILES + tile_rows // order.UNIT_OUTPUTS * assumed.multicast) * order.UNIT_BYTES
        units = rounds * k_units
        # Weights come from memory once.
        from_memory = n * k * weight_bytes / self.gpu.num_sms / units
        outputs = order.PAIR_TILES * order.UNIT_OUTPUTS * tile_rows * {"RAW": F32, "RESIDUAL": 2 * F32, "SWIGLU": F16 / 2}[defines["EPILOGUE"]]
        finish = max(code.finish_clocks, outputs / assumed.l2_shared)
        loading = max(asked / assumed.l2_shared, stage / assumed.l2_rate)
        unit_clocks = max(code.unit_clocks, loading)
        return Kernel(
            name=f"{product_name(defines['EPILOGUE'], n, k)} of blocks", before=assumed.cluster + assumed.memory + loading,
            after=assumed.release, units=units, unit_bytes=from_memory, unit_l2_bytes=stage - from_memory, unit_clocks=unit_clocks,
            piece_units=k_units, piece_clocks=finish, stages=MULTIPLY_RING // stage, first_under_way=MULTIPLY_RING // stage,
            under_way=MULTIPLY_RING // stage, triggers_late=True, shared_bytes=operation["shared_bytes"],
            registers=self.kernels.registers(variant) * operation["threads"])

    def x_bytes(self, defines):
        """Of a stage, what rows have room in."""
        rows, weight_bytes = int(defines["ROWS"]), 1 if defines["WEIGHT"] == "FP8" else 2
        return rows * order.unit_k(weight_bytes) * F16

    def attention_clocks(self, operation, seen):
        """From the end of the kernel ahead to its own."""
        code = self.kernels.attention(operation["variant"], self.assumed)
        defines = self.kernels.defines(operation["variant"])
        tile_rows = int(defines.get("TILE_ROWS", 16))
        is_wide = tile_rows > 16
        rows_of_tile = tile_rows // int(defines["GROUP"])
        heads = self.config["num_kv_heads"]
        items = item_pages = 0
        for first in range(0, seen.rows, rows_of_tile):
            end = seen.context + min(first + rows_of_tile, seen.rows)
            pages = order.up(end, PAGE_TOKENS)
            items += seen.sequences * heads * order.up(end, SPLIT_TOKENS)
            item_pages += seen.sequences * heads * pages
        grid = operation["grid"]
        blocks = min(items, grid)
        per_sm = max(1, round(blocks / self.gpu.num_sms))
        warps = max(1, per_sm * ATTENTION_WARPS // QUARTERS)
        # Warps of narrow tiles take a page each, those of wide ones the same page together.
        rounds = item_pages / blocks / (1 if is_wide else ATTENTION_WARPS)
        clocks = self.assumed.attention + max(1.0, rounds) * code.page_clocks(warps)
        clocks += max(0.0, items / blocks - 1) * self.assumed.item
        levels, splits = 0, order.up(seen.context + seen.rows, SPLIT_TOKENS)
        while splits > 1:
            levels, splits = levels + 1, order.up(splits, RADIX)
        clocks += levels * self.assumed.climb
        # Tiles of one sequence read its pages again, but from the L2 cache.
        return max(clocks, self.assumed.attention + self.clocks_of(self.kv_bytes(seen)))

    def kv_bytes(self, seen):
        """Of one layer, of all positions that are seen."""
        element = 1 if self.config["kv"] == "fp8" else 2
        return seen.sequences * (seen.context + seen.rows) * 2 * self.config["num_kv_heads"] * self.config["head_dim"] * element

    def clocks_of(self, num_bytes):
        """Of memory, for all of the GPU."""
        return num_bytes / (self.gpu.bandwidth * self.assumed.bandwidth) * self.gpu.hertz

    def library(self, operation):
        m, n, k = operation["shape"]
        is_e4m3 = operation["library"] == "fp8"
        macs = self.gpu.e4m3_macs if is_e4m3 else self.gpu.half_macs
        multiplying = m * n * k / (macs * self.assumed.library) * self.gpu.hertz
        reading = self.clocks_of(n * k * (1 if is_e4m3 else 2) + m * n * F32)
        return Kernel("library", before=self.assumed.launch, after=max(multiplying, reading) + self.assumed.release)

    def ends(self, operations, seen):
        """Kernels of a chain, and when each is done, in clocks."""
        kernels = [self.kernel(operations, index, seen) for index in range(len(operations))]
        return kernels, Chain(kernels, self.gpu, self.assumed).ends

    def milliseconds(self, operations, seen):
        """Of a whole pass: a few of its layers are simulated. And those of each kernel of a layer, and of all others."""
        num_layers = self.config["num_layers"]
        if num_layers <= MORE_LAYERS:
            kernels, ends = self.ends(operations, seen)
            return ends[-1] / self.gpu.hertz * 1e3, self.parts(kernels, ends)
        few, more = [self.ends(with_layers(operations, num_layers, layers), seen) for layers in (FEW_LAYERS, MORE_LAYERS)]
        layer = (more[1][-1] - few[1][-1]) / (MORE_LAYERS - FEW_LAYERS)
        clocks = few[1][-1] + layer * (num_layers - FEW_LAYERS)
        return clocks / self.gpu.hertz * 1e3, self.parts(*more)

    def parts(self, kernels, ends):
        """Microseconds from end to end of each kind of kernel: the median."""
        took = {}
        for kernel, start, end in zip(kernels, [0.0, *ends], ends):
            took.setdefault(kernel.name, []).append((end - start) / self.gpu.hertz * 1e6)
        return {name: statistics.median(each) for name, each in took.items()}

    def prompt_milliseconds(self, passes):
        """Of all passes of a prompt: those alike are simulated once, and differ in what their attention sees."""
        known, total = {}, 0.0
        for one in passes:
            operations, rows = one["operations"], one["rows"]
            key = (rows, len(operations))
            nothing = Seen(1, 0, rows)
            if key not in known:
                known[key] = self.milliseconds(operations, nothing)[0]
            attention = next(each for each in operations if each.get("variant", "").startswith("attention"))
            more = self.attention_clocks(attention, Seen(1, one["first"], rows)) - self.attention_clocks(attention, nothing)
            total += known[key] + more * self.config["num_layers"] / self.gpu.hertz * 1e3
        return total

    def weight_bytes(self, operations):
        """Of the matrices of a step of one row, read once."""
        products = [self.kernels.defines(one["variant"]) for one in operations if one.get("variant", "").startswith("gemm")]
        return sum(int(each["SHAPE_N"]) * int(each["SHAPE_K"]) * (1 if each["WEIGHT"] == "FP8" else 2) for each in products)

    def macs(self, operations):
        """Multiply-adds of a row of that step, without its attention: of the layers and of the head."""
        products = [self.kernels.defines(one["variant"]) for one in operations if one.get("variant", "").startswith("gemm")]
        each = [int(one["SHAPE_N"]) * int(one["SHAPE_K"]) for one in products]
        return sum(each[:-1]), each[-1]


def with_layers(operations, num_layers, layers):
    """The operations of a pass of fewer layers: what is before and behind them is launched once."""
    names = [operation.get("variant", "") for operation in operations]
    first = next(index for index, name in enumerate(names) if name.startswith("embed")) + 1
    # Not all passes of a prompt have one.
    last = next((index for index, name in enumerate(names) if "EPILOGUE=HEAD" in name), len(names))
    if names[last - 1] == "normalise":
        # Of the head.
        last -= 1
    length, rest = divmod(last - first, num_layers)
    if rest:
        raise ValueError(f"{last - first} operations between embedding and head, expected {num_layers} layers alike")
    return operations[:first + length * layers] + operations[last:]


def product_name(epilogue, n, k):
    names = {"QKV": "qkv", "RAW": "qkv", "SWIGLU": "gate_up", "HEAD": "head"}
    return names.get(epilogue) or ("out" if k <= n else "down")
