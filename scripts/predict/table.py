"""What `spec-build plan` and the machine-code lint know of GPUs: few figures that stand for the simulation."""

import json
from statistics import mean, median

from assume import CASES, GPUS, assumptions
from kernel import Kernels
from step import MORE_LAYERS, Planner, Seen, with_layers

# The figures are of these; the others say how well they hold elsewhere.
FITTED = ("llama-3.1-8b:fp8", "llama-3.1-8b:fp16", "llama-3.1-8b:fp8-head")
# What the lint compiles as well.
KEPT = FITTED[:2]
CHECKED = ("llama-3.2-1b:fp16", "llama-3.2-1b:fp8", "llama-3.1-70b:fp8")
CHECKED_ROWS = (1, 9, 32, 64, 160)
# Where a product's work changes: each of a tile's warps finishes a row of four, and each number of rows has code of its own.
ROWS = [1, 4, 5, 8, 9, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 160, 192, 193, 256, 320]
# Times as long as units alone: beyond it more is lost than at a boundary.
MUCH = 1.05
MEMORY_GIB = {"H100": 79, "H200": 139}


def config_of(model):
    return {**model["config"], "kv": model["precision"]["kv"], "weights": model["precision"]["weights"]}


def fitted(folder, listed, disassembler, model):
    """Figures of a model's products by format, epilogue and rows; clocks of its attention and of what is around its layers."""
    kernels, assumed, config = Kernels(folder, listed, disassembler), assumptions("mid"), config_of(model)
    products, attention, around = {}, {}, {}
    for gpu in GPUS:
        planner = Planner(kernels, config, gpu, assumed)
        for entry in model["verify"]:
            rows = entry["rows"]
            operations = with_layers(entry["operations"], config["num_layers"], MORE_LAYERS)
            chain, ends = planner.ends(operations, Seen(1, 0, rows))
            took = {}
            for operation, kernel, start, end in zip(operations, chain, [0.0, *ends], ends):
                took.setdefault(operation["variant"], []).append((kernel, end - start))
            rest = 0.0
            for variant, each in took.items():
                kernel, clocks = each[0][0], median(clocks for _, clocks in each)
                if variant.startswith("attention"):
                    attention.setdefault(rows, []).append(clocks)
                elif variant.startswith("gemm"):
                    defines = kernels.defines(variant)
                    serve = kernel.unit_bytes * gpu.num_sms * gpu.hertz / gpu.bandwidth
                    # Parts of sums come once a launch, whatever its units; tiles of the head with them.
                    is_head = defines["EPILOGUE"] == "HEAD"
                    unit = kernel.unit_clocks + (kernel.piece_clocks / kernel.piece_units if is_head else 0)
                    unit = max(unit, (kernel.unit_bytes + kernel.unit_l2_bytes) / assumed.l2_rate)
                    if is_head and clocks > MUCH * kernel.units * max(serve, unit):
                        # Its pieces are many, and where the ring is too small for one of them, what is lost grows with them.
                        unit = clocks / kernel.units
                    key = (defines["WEIGHT"], defines["EPILOGUE"], rows)
                    figures = products.setdefault(key, {"unit": {}, "boundary": {}})
                    figures["unit"].setdefault(gpu.name, []).append(unit)
                    figures["boundary"].setdefault(gpu.name, []).append(clocks - kernel.units * max(serve, unit))
                else:
                    rest += clocks
            around.setdefault(rows, []).append(rest)
    return products, attention, around


def checks(folder, listed, disassembler, model):
    """What the simulation says of a model that no figure is of."""
    kernels, config = Kernels(folder, listed, disassembler), config_of(model)
    found = []
    for gpu in GPUS:
        planner = Planner(kernels, config, gpu, assumptions("mid"))
        for entry in model["verify"]:
            if entry["rows"] in CHECKED_ROWS:
                ms, _ = planner.milliseconds(entry["operations"], Seen(1, 0, entry["rows"]))
                found.append({"model": model["name"], "config": model["config"], "precision": model["precision"],
                              "gpu": gpu.name, "rows": entry["rows"], "ms": round(ms, 3)})
    return found


def budgets(folder, listed, disassembler, model):
    """What the lint holds kernels to."""
    kernels, assumed = Kernels(folder, listed, disassembler), assumptions("mid")
    found = {}
    for variant in {one["variant"] for each in model["verify"] for one in each["operations"]}:
        defines = kernels.defines(variant)
        if variant.startswith("gemm"):
            code = kernels.product(variant, int(defines["ROWS"]), assumed)
            found[variant] = {"unit_instructions": code.unit_instructions, "unit_clocks": round(code.unit_clocks)}
        elif variant.startswith("attention"):
            found[variant] = {"page_instructions": kernels.attention(variant, assumed).page_instructions}
    return found


def off_by(folder, listed, disassembler, model):
    """By which shares a step of one row may take less or more."""
    kernels, entry = Kernels(folder, listed, disassembler), model["verify"][0]
    times = {case: Planner(kernels, config_of(model), GPUS[0], assumptions(case)).milliseconds(entry["operations"], Seen(1, 0, 1))[0]
             for case in CASES}
    return [round(1 - times["low"] / times["mid"], 2), round(times["high"] / times["mid"] - 1, 2)]


def table(pool, folder, launches, disassembler):
    """All of it, for a file."""
    models = {model["name"]: model for model in launches["models"]}

    def submit(task, name):
        return pool.submit(task, folder, launches["kernels"], disassembler, models[name])

    fits = [submit(fitted, name) for name in FITTED]
    other = [submit(checks, name) for name in CHECKED]
    kept = [submit(budgets, name) for name in KEPT]
    shares = submit(off_by, FITTED[0])
    products, attention, around = {}, {}, []
    for fit in fits:
        of_products, of_attention, of_rest = fit.result()
        for key, figures in of_products.items():
            products.setdefault(key, figures)
        for rows, clocks in of_attention.items():
            attention.setdefault(rows, []).extend(clocks)
        around += [clocks for each in of_rest.values() for clocks in each]
    assumed = assumptions("mid")
    return {
        "about": "Predicted from machine code, not measured: written by `scripts/gpu-predict --table`, which says how. Clocks in the "
                 f"middle of what is assumed, of {', '.join(FITTED)}; {launches['compiler']}, {launches['arch']}, kernels "
                 f"{launches['sources']}. `checks` are steps of other models by the simulation, `budgets` what tests/lint holds "
                 "kernels to.",
        "range": shares.result(),
        "gpus": [{"name": gpu.name, "bandwidth": gpu.bandwidth, "memory_gib": MEMORY_GIB[gpu.name], "num_sms": gpu.num_sms,
                  "hertz": gpu.hertz} for gpu in GPUS],
        "products": [{"weight": weight, "epilogue": epilogue, "rows": rows,
                      **{name: {gpu: round(mean(each)) for gpu, each in figure.items()} for name, figure in figures.items()}}
                     for (weight, epilogue, rows), figures in sorted(products.items())],
        "attention": [{"rows": rows, "clocks": round(mean(clocks))} for rows, clocks in sorted(attention.items())],
        "row_kernel": round(assumed.row_kernel + assumed.release),
        "around": round(mean(around)),
        "checks": [check for each in other for check in each.result()],
        "budgets": dict(sorted({key: value for each in kept for key, value in each.result().items()}.items())),
    }


def written(table):
    """As text: a line for each entry of a list."""
    lines = []
    for name, value in table.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n  ".join(json.dumps(each) for each in value)
            lines.append(f'"{name}": [\n  {rows}\n ]')
        elif isinstance(value, dict):
            rows = ",\n  ".join(f"{json.dumps(key)}: {json.dumps(each)}" for key, each in value.items())
            lines.append(f'"{name}": {{\n  {rows}\n }}')
        else:
            lines.append(f'"{name}": {json.dumps(value)}')
    return "{\n " + ",\n ".join(lines) + "\n}\n"
