"""PyTorch at the shapes of scripts/gpu-check: cuBLAS matmuls, and the decode step of a Llama-shaped random model in a
CUDA graph. Prints one JSON object a line. Exits with 77 where there is no PyTorch with CUDA.

    python3 scripts/bench/gpu_peer.py [--budget SECONDS] [--compile]
    python3 scripts/bench/gpu_peer.py --small     all of it but the graphs, on the CPU: does it run with this PyTorch?
"""

import argparse
import json
import math
import statistics
import sys
import time

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    sys.exit(print("no PyTorch here", file=sys.stderr) or 77)

ROWS = (1, 4, 8, 16, 32, 64)
BATCHES = (1, 4, 16, 64)
CONTEXT = 1000
VOCAB = 128256
# Weights that a graph goes through, so that a cache does not hold them.
ROTATED_BYTES = 256 << 20
SAMPLES = 21
SAMPLE_SECONDS = 4e-3
# name: hidden, intermediate, heads, key heads, head size, layers
MODELS = {
    "Llama-3.2-1B": (2048, 8192, 32, 8, 64, 16),
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128, 32),
    "Llama-3.1-70B": (8192, 28672, 64, 8, 128, 80),
}
# A whole model that fits beside nothing else.
STEP_MODELS = ("Llama-3.2-1B", "Llama-3.1-8B")
# In their place on a CPU.
SMALL_MODELS = {"tiny": (64, 160, 4, 2, 16, 2)}

device = "cuda"
failures = []


def say(**entry):
    print(json.dumps(entry), flush=True)


def fail(what, error):
    """What one figure failed of is no reason to go without the others."""
    failures.append(f"{what}: {type(error).__name__}: {error}".splitlines()[0])
    print(failures[-1], file=sys.stderr, flush=True)


def graph_of(work):
    """A recorded call, after calls that let everything be chosen and allocated."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replay_us(graph, replays):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6 / replays


def timed(work, parts=1):
    """Microseconds of one of the equal parts of a call: median and spread over replays."""
    if device == "cpu":
        start = time.perf_counter()
        work()
        us = (time.perf_counter() - start) * 1e6 / parts
        return {"us": us, "low_us": us, "high_us": us, "samples": 1, "replays": 1}
    graph = graph_of(work)
    replay_us(graph, 3)
    replays = max(1, min(10_000, math.ceil(SAMPLE_SECONDS * 1e6 / replay_us(graph, 3))))
    samples = sorted(replay_us(graph, replays) / parts for _ in range(SAMPLES))
    return {"us": round(statistics.median(samples), 3), "low_us": round(samples[2], 3),
            "high_us": round(samples[-3], 3), "samples": SAMPLES, "replays": replays}


def products(hidden, wide, heads, kv_heads, head_dim):
    """Outputs and inputs of each product."""
    return {
        "qkv": ((heads + 2 * kv_heads) * head_dim, hidden),
        "out": (hidden, heads * head_dim),
        "gate_up": (2 * wide, hidden),
        "down": (hidden, wide),
        "head": (VOCAB, hidden),
    }


def half_matmul(n, k, copies):
    weights = [torch.randn(n, k, device=device, dtype=torch.float16) / math.sqrt(k) for _ in range(copies)]

    def of(rows):
        x = torch.randn(rows, k, device=device, dtype=torch.float16)
        return lambda: [F.linear(x, weight) for weight in weights]

    return of


def fp8_matmul(n, k, copies):
    """With a scale a row and a scale an output; rows are padded to 16, as the library wants."""
    kind = torch.float8_e4m3fn
    weights = [torch.randn(n, k, device=device, dtype=torch.float16).to(kind).t() for _ in range(copies)]
    of_outputs = torch.full((1, n) if device == "cuda" else (1,), 1 / math.sqrt(k), device=device)

    def of(rows):
        padded = -(-rows // 16) * 16
        x = torch.randn(padded, k, device=device, dtype=torch.float16).to(kind)
        # A CPU takes one scale for all.
        of_rows = torch.ones((padded, 1) if device == "cuda" else 1, device=device)
        multiply = lambda weight: torch._scaled_mm(x, weight, scale_a=of_rows, scale_b=of_outputs,
                                                   out_dtype=torch.bfloat16)
        return lambda: [multiply(weight) for weight in weights]

    return of


def matmuls(models, deadline):
    for model, (hidden, wide, heads, kv_heads, head_dim, _) in models.items():
        for kernel, (n, k) in products(hidden, wide, heads, kv_heads, head_dim).items():
            for dtype, make, size in (("FP16", half_matmul, 2), ("FP8", fp8_matmul, 1)):
                if kernel == "head" and dtype == "FP8":
                    continue
                if time.monotonic() > deadline:
                    return
                copies = max(1, math.ceil(ROTATED_BYTES / (n * k * size))) if device == "cuda" else 2
                try:
                    work = make(n, k, copies)
                    for rows in ROWS:
                        say(list="matmul", model=f"{model} {dtype}", kernel=kernel, rows=rows, n=n, k=k,
                            time=timed(work(rows), copies))
                except (RuntimeError, TypeError, NotImplementedError) as error:
                    fail(f"{model} {kernel} {dtype}", error)
                work = None
                if device == "cuda":
                    torch.cuda.empty_cache()


class Llama:
    """Random weights and a cache of so many positions, all of them filled; a step writes over the last one."""

    def __init__(self, hidden, wide, heads, kv_heads, head_dim, layers):
        matrix = lambda n, k: torch.randn(n, k, device=device, dtype=torch.float16) / math.sqrt(k)
        shapes = products(hidden, wide, heads, kv_heads, head_dim)
        self.layers = [{name: matrix(*shapes[name]) for name in ("qkv", "out", "gate_up", "down")}
                       for _ in range(layers)]
        self.embed = matrix(VOCAB, hidden)
        self.head = matrix(VOCAB, hidden)
        self.norm = torch.ones(hidden, device=device, dtype=torch.float16)
        self.sizes = heads, kv_heads, head_dim
        angles = (CONTEXT - 1) * 500_000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
        self.cos, self.sin = angles.cos().half(), angles.sin().half()

    def begin(self, batch):
        _, kv_heads, head_dim = self.sizes
        shape = batch, kv_heads, CONTEXT, head_dim
        cache = lambda: torch.randn(shape, device=device, dtype=torch.float16)
        self.caches = [(cache(), cache()) for _ in self.layers]
        self.tokens = torch.randint(VOCAB, (batch,), device=device)

    def rotate(self, x):
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * self.cos - high * self.sin, high * self.cos + low * self.sin), dim=-1)

    def attend(self, layer, cache, x):
        heads, kv_heads, head_dim = self.sizes
        keys, values = cache
        split = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        q, k, v = F.linear(x, layer["qkv"]).split(split, dim=-1)
        keys[:, :, -1] = self.rotate(k.view(-1, kv_heads, head_dim))
        values[:, :, -1] = v.view(-1, kv_heads, head_dim)
        q = self.rotate(q.view(-1, heads, 1, head_dim))
        out = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        return F.linear(out.flatten(1), layer["out"])

    def step(self):
        """One token of every sequence."""
        x = F.embedding(self.tokens, self.embed)
        norm = lambda x: F.rms_norm(x, self.norm.shape, self.norm, 1e-5)
        for layer, cache in zip(self.layers, self.caches):
            x = x + self.attend(layer, cache, norm(x))
            gate, up = F.linear(norm(x), layer["gate_up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        return F.linear(norm(x), self.head).argmax(dim=-1)


def steps(models, deadline, compiled):
    for model, sizes in models.items():
        llama = Llama(*sizes)
        for batch in BATCHES:
            if time.monotonic() > deadline:
                return
            name = {"list": "step", "model": f"{model} FP16", "batch": batch, "context": CONTEXT}
            try:
                llama.begin(batch)
                say(**name, compiled=False, time=timed(llama.step))
                if compiled and batch == 1:
                    say(**name, compiled=True, time=timed(torch.compile(llama.step)))
            except (RuntimeError, TypeError, NotImplementedError) as error:
                fail(f"{model} batch {batch}", error)
        del llama
        if device == "cuda":
            torch.cuda.empty_cache()


def main():
    global device
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=120, help="seconds after which nothing more is begun")
    parser.add_argument("--compile", action="store_true", help="also the compiled step of one sequence")
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU, without graphs")
    args = parser.parse_args()
    if args.small:
        device = "cpu"
    elif not torch.cuda.is_available():
        sys.exit(print("PyTorch sees no GPU", file=sys.stderr) or 77)
    deadline = time.monotonic() + args.budget
    gpu = "none" if args.small else torch.cuda.get_device_name()
    say(list="about", torch=torch.__version__, cuda=torch.version.cuda, gpu=gpu)
    step_models = SMALL_MODELS if args.small else {name: MODELS[name] for name in STEP_MODELS}
    with torch.inference_mode():
        steps(step_models, deadline, args.compile)
        matmuls(SMALL_MODELS if args.small else MODELS, deadline)
    if failures:
        sys.exit(f"{len(failures)} figures failed, first {failures[0]}")


main()
