"""The markdown of scripts/bench/peers: medians over rounds, and ratios within rounds."""

from statistics import median

# Name of the prompt that only the prefill is measured with.
PREFILL = "prefill"
# Share of the CPU that something else may take; beyond it, peers that spin between threads lose many times that.
MAX_OTHER_CPU = 0.05


def decode_rate(rows):
    """Tokens a second after the first, over all `rows` together; None where nothing was decoded."""
    num_tokens = sum(len(row["tokens"]) - 1 for row in rows if len(row["tokens"]) > 1)
    decode_ms = sum(row["decode_ms"] for row in rows if len(row["tokens"]) > 1)
    return 1e3 * num_tokens / decode_ms if decode_ms else None


def prefill_rate(rows):
    """Prompt tokens a second."""
    return 1e3 * sum(row["prompt_len"] for row in rows) / sum(row["prefill_ms"] for row in rows)


def describe(row):
    """A row in a few words, for the log."""
    decode = decode_rate([row])
    tail = f", {decode:.1f} tokens/s" if decode else ""
    return f"prefill {prefill_rate([row]):.0f} tokens/s{tail}, {row['gb_per_s']:.0f} GB/s, other CPU {row['other_cpu']:.0%}"


def first_difference(one, other):
    """Index of the first differing token; None for equal outputs (an end token may be shown by one of them only)."""
    for idx, (a, b) in enumerate(zip(one, other)):
        if a != b:
            return idx
    return None if abs(len(one) - len(other)) <= 1 else min(len(one), len(other))


class Measured:
    """The rows of a result, by engine and round."""

    def __init__(self, result):
        self.rows = result["rows"]
        self.rounds = range(1, len(result["bandwidth_gb_per_s"]) + 1)
        self.engines = result["engines"]
        self.labels = list(self.engines)
        self.prompts = list(dict.fromkeys(row["prompt"] for row in self.rows if row["prompt"] != PREFILL))

    def bits(self, label):
        """Bits a weight, None where that is not known."""
        return self.engines[label].get("bits")

    def divergence(self, label):
        """Mean divergence from fp32 in nats, None where it was not measured."""
        return (self.engines[label].get("divergence") or {}).get("mean")

    def of(self, label, round_no=None, prompt=None):
        """Decoding rows, or those of one round or prompt."""
        return [row for row in self.rows if row["engine"] == label
                and (round_no is None or row["round"] == round_no)
                and (row["prompt"] == prompt if prompt else row["prompt"] != PREFILL)]

    def rates(self, label, prompt=None):
        """Decode rate of each round, None where there is none."""
        return [decode_rate(self.of(label, round_no, prompt)) for round_no in self.rounds]

    def plain(self, label):
        """The same engine without drafts, if it is here and `label` drafts."""
        plain = label.split(" + ")[0]
        return plain if plain != label and plain in self.labels else None

    def ratio(self, label, base, prompt=None):
        """Median over rounds of `label`'s decode rate by that of `base`."""
        pairs = [(a, b) for a, b in zip(self.rates(label, prompt), self.rates(base, prompt)) if a and b]
        return median(a / b for a, b in pairs) if pairs else None

    def identical(self, label, plain):
        """How many prompts give the tokens of plain decoding, of how many."""
        pairs = [(self.of(label, 1, prompt), self.of(plain, 1, prompt)) for prompt in self.prompts]
        pairs = [(a[0]["tokens"], b[0]["tokens"]) for a, b in pairs if a and b]
        return f"{sum(first_difference(a, b) is None for a, b in pairs)}/{len(pairs)}" if pairs else ""


def cell(value, digits=1, unit=""):
    """A number, or nothing."""
    return "" if value is None else f"{value:.{digits}f}{unit}"


def median_of(values):
    """Median of those that are there."""
    values = [value for value in values if value is not None]
    return median(values) if values else None


def line(cells):
    """A line of a table."""
    return "| " + " | ".join(cells) + " |"


def rule(num_columns):
    """The line under a table's head."""
    return line(["---"] + ["---:"] * (num_columns - 1))


def decode_table(measured):
    """Decode rates by engine and prompt."""
    plain_labels = [label for label in measured.labels if " + " not in label and measured.of(label)]
    head = ["decode, tokens/s", "bits a weight", "KL", *measured.prompts, "**all**", "x own plain", *[f"x {label}" for label in plain_labels],
            "accepted a step", "as own plain", "other CPU"]
    lines = [line(head), rule(len(head))]
    for label in measured.labels:
        rows = measured.of(label)
        if not rows:
            continue
        plain = measured.plain(label)
        accepted = sum(row.get("accepted", 0) for row in rows)
        # Beyond the first token, a step gives one token more than it accepts.
        num_steps = sum(len(row["tokens"]) - 1 for row in rows) - accepted
        lines.append(line([
            label,
            cell(measured.bits(label), 1) or "not known",
            # Drafts change none of the target's distributions.
            "" if plain else cell(measured.divergence(label), 5) or "not measured",
            *[cell(median_of(measured.rates(label, prompt))) for prompt in measured.prompts],
            f"**{cell(median_of(measured.rates(label)))}**",
            cell(measured.ratio(label, plain), 2) if plain else "",
            *[cell(measured.ratio(label, other), 2) for other in plain_labels],
            cell(accepted / num_steps, 2) if accepted and num_steps else "",
            measured.identical(label, plain) if plain else "",
            f"{max(row['other_cpu'] for row in rows):.0%}",
        ]))
    return lines


def ratio_table(measured):
    """What drafts bring by prompt, and over all of their tokens."""
    drafting = [label for label in measured.labels if measured.plain(label) and measured.of(label)]
    if not drafting:
        return []
    head = ["x own plain", *measured.prompts, "least", "**all**"]
    lines = [line(head), rule(len(head))]
    for label in drafting:
        ratios = [measured.ratio(label, measured.plain(label), prompt) for prompt in measured.prompts]
        least = min((ratio for ratio in ratios if ratio), default=None)
        whole = measured.ratio(label, measured.plain(label))
        lines.append(line([label, *[cell(ratio, 2) for ratio in ratios], cell(least, 2), f"**{cell(whole, 2)}**"]))
    return ["", *lines]


def prefill_table(measured):
    """Prefill rates by engine."""
    long_rows = {label: measured.of(label, prompt=PREFILL) for label in measured.labels}
    num_tokens = next(rows[0]["prompt_len"] for rows in long_rows.values() if rows)
    head = ["prefill, tokens/s", f"{num_tokens} tokens", "the prompts"]
    lines = [line(head), rule(len(head))]
    for label, rows in long_rows.items():
        prompts = [prefill_rate(measured.of(label, round_no)) for round_no in measured.rounds if measured.of(label, round_no)]
        lines.append(line([label, cell(median_of([prefill_rate([row]) for row in rows]), 0), cell(median_of(prompts), 0)]))
    return lines


def round_table(measured, bandwidth):
    """Bandwidth and decode rates, round by round."""
    labels = [label for label in measured.labels if measured.of(label)]
    head = ["round", "GB/s, median (range)", *labels]
    lines = [line(head), rule(len(head))]
    for round_no, probes in zip(measured.rounds, bandwidth):
        span = f"{median(probes):.0f} ({min(probes):.0f}-{max(probes):.0f})"
        lines.append(line([str(round_no), span, *[cell(decode_rate(measured.of(label, round_no))) for label in labels]]))
    return lines


def contention(rows):
    """A warning, where the machine was not idle enough."""
    num_contended = sum(row["other_cpu"] > MAX_OTHER_CPU for row in rows)
    if not num_contended:
        return []
    return [f"**Not to be quoted:** other programs took more than {MAX_OTHER_CPU:.0%} of the CPU "
            f"in {num_contended} of {len(rows)} measurements."]


def markdown(result):
    """The report."""
    measured = Measured(result)
    versions = ", ".join(f"{label}: {engine['version']}" for label, engine in result["engines"].items() if " + " not in label)
    return "\n".join([
        f"{result['cpu']}, {result['threads']} threads, {result['tokens']} new tokens, greedy, {len(measured.rounds)} rounds; "
        f"commit {result['commit']}, {result['date']}.",
        f"Versions: {versions}.",
        *contention(result["rows"]),
        "",
        *decode_table(measured),
        *ratio_table(measured),
        "",
        *prefill_table(measured),
        "",
        *round_table(measured, result["bandwidth_gb_per_s"]),
    ])
