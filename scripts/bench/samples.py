"""What a server takes of memory while it serves, sampled, beside what its models tell of theirs."""

import asyncio
import collections
import contextlib
import statistics
import time

# Of all pages, for the process to have touched what it was promised.
FILLED_SHARE = 0.95
SAMPLE_SECONDS = 3
# A page of SmolLM2-135M: 16 tokens, 30 layers, 3 key heads of 64, keys and values in 16 bits.
PAGE_BYTES = 16 * 30 * 3 * 64 * 2 * 2


async def passes(ended, seconds):
    """Waits so long; whether it has ended."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(ended.wait(), seconds)
    return ended.is_set()


Sample = collections.namedtuple("Sample", "seconds resident own files group told pages filled models is_steady")


def beside_told(sample):
    """What the process has beside what is told and touched, as a share of what is told."""
    return (sample.own - sample.told + (sample.pages - sample.filled) * PAGE_BYTES) / sample.told


class Memory:
    """What the process has, what its control group has, and what the models tell of theirs; in bytes."""

    def __init__(self, models, group):
        self.models, self.group = models, group
        self.start, self.samples = time.perf_counter(), []
        self.before = models.server.memory()

    async def sample_always(self, ended):
        """Every few seconds."""
        while not await passes(ended, SAMPLE_SECONDS):
            await self.sample()

    async def sample(self):
        """All figures of this moment; steady where no model came or went meanwhile."""
        before = None if self.models.is_changing else list(self.models.loaded)
        told = pages = filled = 0
        for model in before or self.models.loaded:
            metrics = await asyncio.to_thread(self.models.server.metrics, model)
            told += metrics.get('nv_trt_llm_runtime_memory_metrics{memory_type="cpu"}', 0)
            most, free = (metrics.get(f'nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="{kind}"}}', 0)
                          for kind in ("max", "free"))
            pages += most
            filled += most - free
        resident, own = self.models.server.memory()
        is_steady = before == self.models.loaded and not self.models.is_changing
        self.samples.append(Sample(round(time.perf_counter() - self.start, 1), resident, own - self.before[1],
                                   resident - own, self.group.in_use(), told, pages, filled, len(self.models.loaded),
                                   is_steady))

    def steady(self):
        """Samples while no model came or went."""
        return [one for one in self.samples if one.is_steady]

    def compared(self):
        """Those of which both sides mean the same: nearly all pages hold something."""
        return [one for one in self.steady() if one.filled >= FILLED_SHARE * one.pages]

    def differences(self):
        """Of the process's own memory from what is told, as shares of the latter, in order."""
        return sorted(one.own / one.told - 1 for one in self.compared())

    def growth(self):
        """Of what it has beside what is told, from the first quarter of the time to the last."""
        beside = [beside_told(one) for one in self.compared()]
        quarter = max(1, len(beside) // 4)
        return statistics.median(beside[-quarter:]) - statistics.median(beside[:quarter])
