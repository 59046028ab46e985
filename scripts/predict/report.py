"""What is predicted for a model, as figures and as markdown."""

from assume import ASSUMED, CASES, GPUS, assumptions
from step import Planner, Seen


def predict(model, kernels, context):
    """All figures of a model: each in all cases of the assumptions, beside its floor."""
    config = {**model["config"], "kv": model["precision"]["kv"], "weights": model["precision"]["weights"]}
    one_row = model["steps"][0]["operations"]
    result = {"name": model["name"], "context": context, "gpus": {}}
    for gpu in GPUS:
        planners = {case: Planner(kernels, config, gpu, assumptions(case)) for case in CASES}
        planner = planners["mid"]
        layer_macs, head_macs = planner.macs(one_row)
        weights = planner.weight_bytes(one_row)

        def step(entry, name):
            seen = Seen(entry["sequences"], context, entry["rows"] // entry["sequences"])
            times = {case: each.milliseconds(entry["operations"], seen) for case, each in planners.items()}
            read = weights + config["num_layers"] * planner.kv_bytes(seen)
            floor = max(read / gpu.bandwidth, entry["rows"] * (layer_macs + head_macs) / gpu.half_macs) * 1e3
            return {"what": name, "sequences": entry["sequences"], "rows": entry["rows"], "floor": floor,
                    **{case: ms for case, (ms, _) in times.items()}, "parts_us": times["mid"][1]}

        def prompt(entry):
            rate = gpu.e4m3_macs if config["weights"] == "fp8" else gpu.half_macs
            # Every position sees those before it: scores and values.
            seen_macs = entry["tokens"] ** 2 * config["num_heads"] * config["head_dim"] * config["num_layers"]
            multiplying = (entry["tokens"] * layer_macs + head_macs) / rate + seen_macs / gpu.half_macs
            floor = max(weights / gpu.bandwidth, multiplying) * 1e3
            times = {case: each.prompt_milliseconds(entry["passes"]) for case, each in planners.items()}
            return {"way": entry["way"], "tokens": entry["tokens"], "floor": floor, **times}

        result["gpus"][gpu.name] = {
            "bandwidth": gpu.bandwidth,
            "steps": [step(entry, "step") for entry in model["steps"]] + [step(model["draft"], "draft pass")],
            "prompts": [prompt(entry) for entry in model["prompts"]],
        }
    result["kernels"] = [figures(kernels, variant) for variant in used(model)]
    return result


def used(model):
    """Products and attentions of the steps, each once."""
    operations = [one for step in model["steps"] for one in step["operations"]]
    operations += [one for each in model["prompts"] if each["way"] == "exact" for one in each["passes"][0]["operations"]]
    variants = {one["variant"] for one in operations if one.get("variant", "").startswith(("gemm", "attention"))}
    return sorted(variants, key=lambda name: (name.split(".")[0], name))


def figures(kernels, variant):
    """What the machine code of a kernel says, in the middle of the assumptions."""
    assumed = assumptions("mid")
    defines = kernels.defines(variant)
    entry = {"variant": variant, "registers": kernels.registers(variant)}
    if variant.startswith("attention"):
        code = kernels.attention(variant, assumed)
        return {**entry, "page_instructions": code.page_instructions, "page_clocks": code.page_clocks(2)}
    code = kernels.product(variant, int(defines["ROWS"]), assumed)
    return {
        **entry, "unit_instructions": code.unit_instructions, "unit_clocks": code.unit_clocks,
        "finish_clocks": code.finish_clocks, "triggers_late": code.triggers_late,
    }


def line(cells):
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def table(head, rows):
    return [line(head), line(["---"] + ["---:"] * (len(head) - 1)), *map(line, rows), ""]


def spread(entry, digits=2):
    """A time, and in brackets the range of the assumptions."""
    low, mid, high = (f"{entry[case]:.{digits}f}" for case in CASES)
    return f"{mid} ({low}-{high})"


def markdown(results, launches):
    """The report."""
    lines = [
        f"**Predicted, not measured**: from the machine code of {launches['compiler']} for {launches['arch']}, kernels "
        f"{launches['sources']}. Times in ms, in brackets the range of the assumptions; a floor is what memory or the tensor "
        "cores take at least.", "",
    ]
    for result in results:
        lines += model_lines(result)
    lines += ["### Assumed", ""]
    lines += table(["", "low", "mid", "high", "what"],
                   [[name, each.low, each.mid, each.high, each.what] for name, each in ASSUMED.items()])
    return "\n".join(lines).rstrip()


def model_lines(result):
    gpus = result["gpus"]
    context = f", each sequence with {result['context']} tokens before" if result["context"] else ""
    lines = [f"### {result['name']}{context}", ""]
    head = ["pass", *[cell for name in gpus for cell in (f"floor, {name}", name, "to the floor", "to one row")]]
    rows = []
    for index, entry in enumerate(next(iter(gpus.values()))["steps"]):
        rows_here, sequences = number(entry["rows"], "row"), number(entry["sequences"], "sequence")
        cells = [f"{entry['what']}, {rows_here} of {sequences}"]
        for gpu in gpus.values():
            each, one = gpu["steps"][index], gpu["steps"][0]
            cells += [f"{each['floor']:.2f}", spread(each), f"{each['mid'] / each['floor']:.2f}", f"{each['mid'] / one['mid']:.2f}"]
        rows.append(cells)
    lines += table(head, rows)
    rows = []
    for index, entry in enumerate(next(iter(gpus.values()))["prompts"]):
        cells = [f"{entry['tokens']} tokens, {entry['way']}"]
        for gpu in gpus.values():
            each = gpu["prompts"][index]
            cells += [f"{each['floor']:.1f}", spread(each, 1), f"{each['mid'] / each['floor']:.1f}"]
        rows.append(cells)
    lines += table(["prompt", *[cell for name in gpus for cell in (f"floor, {name}", name, "to the floor")]], rows)
    names = list(dict.fromkeys(name for gpu in gpus.values() for name in gpu["steps"][0]["parts_us"]))
    rows = [[name, *[f"{gpu['steps'][0]['parts_us'][name]:.1f}" for gpu in gpus.values()]] for name in names]
    lines += table(["kernel of a step of one row, us from end to end", *gpus], rows)
    products = [each for each in result["kernels"] if "unit_clocks" in each]
    lines += table(
        ["product", "instructions a unit", "clocks a unit of two tiles", "outputs", "trigger"],
        [[short(each["variant"]), each["unit_instructions"], f"{each['unit_clocks']:.0f}", f"{each['finish_clocks']:.0f}",
          "late" if each["triggers_late"] else "early"] for each in products])
    lines += table(["attention", "instructions a page", "clocks a page of two warps"],
                   [[short(each["variant"]), each["page_instructions"], f"{each['page_clocks']:.0f}"]
                    for each in result["kernels"] if "page_clocks" in each])
    return lines


def number(count, thing):
    """So many of a thing."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def short(variant):
    """The defines of a variant."""
    return " ".join(part.split("=")[-1] for part in variant.split(".")[1:])
