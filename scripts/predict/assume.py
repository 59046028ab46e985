"""What is assumed of a GPU, because no machine code says it: each with the range in which it may lie. What is measured one day
goes here."""

from functools import cache
from typing import NamedTuple


class Range(NamedTuple):
    """Low is what makes a step fast."""

    low: float
    mid: float
    high: float
    what: str


class Gpu(NamedTuple):
    """A product by its data sheet."""

    name: str
    # Bytes a second that reading reaches: measured on an H100 by scripts/gpu-check. Of an H200, what a copy reached.
    bandwidth: float
    num_sms: int
    hertz: float
    # Multiply-adds a second of the tensor cores, dense, of halves and of e4m3.
    half_macs: float
    e4m3_macs: float
    # That one multiprocessor gives its blocks, and keeps of each.
    shared_bytes: int
    reserved_bytes: int
    registers: int


H100 = Gpu("H100", 3.05e12, 132, 1.98e9, 989e12 / 2, 1979e12 / 2, 228 << 10, 1 << 10, 65536)
H200 = H100._replace(name="H200", bandwidth=4.3e12)
GPUS = (H100, H200)

ASSUMED = {
    "bandwidth": Range(1.04, 1.0, 0.95, "share of the bandwidth above that is reached"),
    "l1": Range(33, 36, 60, "clocks of a load that finds again what the multiprocessor has loaded: 33 measured"),
    "l2": Range(286, 450, 700, "clocks of a load from the L2 cache: 286 measured where nobody else loads"),
    "l2_rate": Range(81, 76, 40, "bytes a clock that a multiprocessor gets from the L2 cache: 76 and 81 measured where nobody else loads"),
    "l2_shared": Range(40, 31.6, 28, "the same where all of them ask, of products with blocks of prompts: 31.6 measured"),
    "multicast": Range(0.5, 0.5, 1, "of rows that two blocks share, the part that counts for each of them as delivered by the L2 cache: not measured"),
    "cluster": Range(200, 360, 600, "clocks in which the blocks of a cluster meet: not measured"),
    "memory": Range(661, 1000, 1500, "clocks of a load from memory: 661 measured where nobody else loads"),
    "count": Range(1000, 1300, 1700, "clocks of a barrier over memory and an atomic addition behind it: 1293 measured"),
    "release": Range(1000, 1230, 1600, "clocks from the end of a grid to where the next one goes on, which waits for it: 1231 measured"),
    "launch": Range(1200, 1340, 1750, "clocks from the trigger to the first instruction of the next kernel's blocks: 1343 measured"),
    "copying": Range(700, 930, 1300, "clocks from there to the first product: the first unit's rows; 930 measured in a chain"),
    "copy": Range(41, 53, 83, "clocks of a warp for a copy of 16 bytes a lane: 53 measured with one warp, 83 with each of two"),
    "attention": Range(3000, 4200, 6000, "clocks of attention but for its pages: queries, sums; its plan is made before"),
    "item": Range(2000, 3000, 4000, "clocks of each further item of a block of the attention, but for its pages"),
    "climb": Range(1800, 2500, 3500, "clocks of a level of splits that blocks of the attention add up for each other"),
    "rows": Range(2200, 3300, 4000, "clocks of `rows`"),
    "row_kernel": Range(4000, 5300, 6500, "clocks of `embed` and of a kernel that works row by row, but for its bytes"),
    "sample": Range(4000, 4500, 6500, "clocks of `sample`"),
    "accept": Range(3500, 4900, 5500, "clocks of `accept`"),
    "library": Range(0.7, 0.6, 0.45, "share of the tensor cores' rate that a library reaches"),
    "mma": Range(5.5, 6, 8, "clocks that a product of mma.sync keeps the tensor core of a quarter"),
    "wgmma": Range(12, 12, 18, "clocks that a product of a warpgroup keeps it at least, however few its columns: 12 measured, weights from registers"),
    "wgmma_latency": Range(36, 54, 60, "clocks from there until sums can be read: 54 measured"),
}
CASES = ("low", "mid", "high")


class Assumptions:
    """One case of all of them, as attributes."""

    def __init__(self, case):
        for name, value in ASSUMED.items():
            setattr(self, name, getattr(value, case))


@cache
def assumptions(case):
    """The same ones each time, so that what is found with them is found once."""
    return Assumptions(case)
