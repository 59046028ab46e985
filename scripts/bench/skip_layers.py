"""What a model that drafts with a subset of its own layers accepts, and the speed-up that is predicted from it.

A skip set is searched on some texts and judged on others. With --search it is searched on the model's own greedy answers to
those and judged on all of --prompts; without, it is searched on every second one of --prompts and judged on the rest.
Acceptance is exact: tokens before a draft have the whole model's keys and values, the draft's own rows those of its layers.
Speed-ups are predictions: a draft's pass takes the share of the weights that it reads, and verification of 2, 3, ... rows
what --verify says. All of them are relative to plain decoding.
"""

import argparse
import json
import pathlib
import random
import sys
import time

import torch

from skip_model import Model, Rows, Text

# A draft ends with the first token whose probability is below this, where it ends early.
THRESHOLDS = (0.3, 0.5, 0.7, 0.8, 0.9)
# Numbers of MLPs that are left out in the table.
SHOWN = (1, 2, 4, 6, 8, 12, 16, 20, 24)


def arguments():
    parser = argparse.ArgumentParser(prog="skip-layers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=pathlib.Path)
    parser.add_argument("--prompts", required=True, help="{KEY: [{name, ids}]}: what skip sets are judged on")
    parser.add_argument("--tokenizer", required=True, help="KEY in --prompts")
    parser.add_argument("--reference", help="answers to --prompts, {runs: [[{name, tokens}]]}; else the model's own")
    parser.add_argument("--search", nargs="+", help="JSON lines with `prompt` or `turns`: what is searched on")
    parser.add_argument("--num", type=int, default=16, help="prompts to search on")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of their answers")
    parser.add_argument("--rows", type=int, default=400, help="positions of them that a skip set is tried at")
    parser.add_argument("--minutes", type=float, default=30, help="of search")
    parser.add_argument("--tried", type=int, default=6, help="sublayers tried before one is left out")
    parser.add_argument("--draft-len", type=int, default=6, help="at most")
    parser.add_argument("--verify", default="1.09,1.09,1.12,1.15,1.21,1.26",
                        help="time of a pass over 2, 3, ... rows, by that over one (docs/measured.md: int8, avx512)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    args.verify = [1.0] + [float(part) for part in args.verify.split(",")]
    if len(args.verify) <= args.draft_len:
        parser.error(f"--verify has {len(args.verify) - 1} times, --draft-len {args.draft_len} needs as many")
    return args


class Cost:
    """Of a draft's pass, by that of a plain step."""

    def __init__(self, model, verify):
        self.parts, self.head = model.sizes()
        self.total, self.verify = sum(self.parts) + self.head, verify

    def draft(self, skipped):
        return 1 - sum(self.parts[sublayer] for sublayer in skipped) / self.total

    def estimate(self, acceptance, skipped):
        """The best of all draft lengths, were every position accepted at the same rate."""
        tokens = lambda length: sum(acceptance**i for i in range(length + 1))
        cost = self.draft(skipped)
        return max(tokens(length) / (length * cost + verify) for length, verify in enumerate(self.verify) if length)

    def needed(self, skipped, speedup=1.15):
        """The least acceptance at every position that would give this."""
        rates = [percent / 100 for percent in range(101)]
        return next((f"{rate:.2f}" for rate in rates if self.estimate(rate, skipped) >= speedup), "never")


class Search:
    def __init__(self, model, cost, rows, tried):
        self.model, self.cost, self.rows, self.tried = model, cost, rows, tried
        self.deadline = 0.0
        self.expected = rows.tokens(ahead=1)
        self.num_tried = 0

    def late(self):
        return time.monotonic() > self.deadline

    def score(self, skipped, start=0, x=None, states=None):
        """Mean of the share of tokens that are accepted and of their probability, which is less noisy."""
        self.rows.earlier.clear()
        self.num_tried += 1
        x = self.model.forward(self.rows, skipped, start=start, x=x, states=states)
        right, probability, _ = self.model.judge(x, self.expected)
        return (right.float().mean() + probability.mean()).item() / 2

    def mlps(self):
        """MLPs left out one after another, each time the least harmful of those that were so the last time."""
        path, skipped, last = [frozenset()], frozenset(), {}
        candidates = set(range(1, self.model.num_sublayers, 2))
        while candidates and not self.late():
            states = []
            self.score(skipped, states=states)
            order = sorted(candidates, key=lambda sublayer: -last.get(sublayer, 0))
            if last:
                order = order[:self.tried]
            for sublayer in order:
                last[sublayer] = self.score(skipped | {sublayer}, sublayer + 1, states[sublayer])
            best = max(order, key=last.get)
            skipped |= {best}
            candidates.remove(best)
            path.append(skipped)
            self.tell(skipped, last[best])
        return path

    def attentions(self, skipped):
        """Then those attentions that are not worth their time, the least harmful first."""
        states = []
        best = self.cost.estimate(self.score(skipped, states=states), skipped)
        alone = {sublayer: self.score(skipped | {sublayer}, sublayer + 1, states[sublayer])
                 for sublayer in range(0, self.model.num_sublayers, 2) if not self.late()}
        for sublayer in sorted(alone, key=alone.get, reverse=True)[:self.model.num_layers // 2]:
            if self.late():
                break
            score = self.score(skipped | {sublayer})
            estimate = self.cost.estimate(score, skipped | {sublayer})
            if estimate > best:
                best, skipped = estimate, skipped | {sublayer}
                self.tell(skipped, score)
        return skipped

    def swaps(self, skipped, seed=1):
        """Then exchanges at random of one sublayer for another of the same kind, until the time is over."""
        draw = random.Random(seed)
        best = self.score(skipped)
        while not self.late():
            out = draw.choice(sorted(skipped))
            others = [i for i in range(out % 2, self.model.num_sublayers, 2) if i not in skipped]
            if not others:
                continue
            other = skipped - {out} | {draw.choice(others)}
            score = self.score(other)
            if score > best:
                best, skipped = score, other
                self.tell(skipped, score)
        return skipped

    def tell(self, skipped, score):
        print(f"{self.num_tried} tried; skips {len(skipped)}: cost {self.cost.draft(skipped):.3f}, score {score:.3f}, "
              f"estimate {self.cost.estimate(score, skipped):.3f}: {names(skipped)}", file=sys.stderr, flush=True)


class Drafts:
    """What is accepted of a draft from each position of a text's answer, and how sure the skipped model was."""

    def __init__(self, model, texts, skipped, draft_len):
        self.texts = texts
        self.accepted = {}  # (name, position) -> accepted tokens, at most draft_len
        self.confidence = {}  # (name, position, index in the draft) -> probability of the drafted token
        self.reached, self.right = [0] * draft_len, [0] * draft_len
        rows = Rows(texts, [list(range(text.num_prompt, len(text.tokens) - 1)) for text in texts])
        self.num_starts = len(rows.positions)
        for index in range(draft_len):
            right, _, confidence = model.judge(model.forward(rows, skipped), rows.tokens(ahead=1))
            self.reached[index] = len(right)
            self.right[index] = int(right.sum())
            for owner, first, is_right, sure in zip(rows.owners, rows.first.tolist(), right.tolist(), confidence.tolist()):
                self.accepted[owner.name, first] = index + is_right
                self.confidence[owner.name, first, index] = sure
            ends = torch.tensor([position + 2 >= len(text.tokens) for text, position in
                                 zip(rows.owners, rows.positions.tolist())])
            alive = right & ~ends
            if not alive.any():
                break
            rows = rows.next(alive)

    def by_position(self):
        """Share of all drafts whose tokens up to the first, second, ... one are accepted."""
        return [right / self.num_starts for right in self.right]

    def decode(self, length, cost, verify, threshold=0.0, clairvoyant=False, texts=None):
        """Predicted speed-up of decoding the answers with drafts of this length, and tokens a pass of the whole model."""
        produced = spent = passes = 0
        for text in texts or self.texts:
            position, last = text.num_prompt, len(text.tokens) - 1
            while position < last:
                accepted = self.accepted[text.name, position]
                drafted, limit = 0, min(length, last - position - 1)
                if clairvoyant:
                    drafted = min(limit, accepted)
                else:
                    while drafted < limit:
                        # A draft's tokens after one that is refused are not known: they are as sure as that one.
                        sure = self.confidence.get((text.name, position, min(drafted, accepted)), 0.0)
                        drafted += 1
                        if sure < threshold:
                            break
                gained = min(accepted, drafted) + 1
                spent += drafted * cost + verify[drafted]
                position += gained
                produced += gained
                passes += 1
        return produced / spent, produced / passes


def names(skipped):
    of = lambda kind: ",".join(str(i // 2) for i in sorted(skipped) if i % 2 == kind) or "none"
    return f"attention {of(0)}; MLP {of(1)}"


def report(model, cost, title, skipped, texts, draft_len):
    drafts = Drafts(model, texts, skipped, draft_len)
    share, free = cost.draft(skipped), [1.0] * len(cost.verify)
    lengths = range(1, draft_len + 1)
    fixed, length = max((drafts.decode(k, share, cost.verify)[0], k) for k in lengths)
    tokens = drafts.decode(length, share, cost.verify)[1]
    early, early_len, threshold = max((drafts.decode(k, share, cost.verify, limit)[0], k, limit)
                                      for k in lengths for limit in THRESHOLDS)
    unpaid = max(drafts.decode(k, share, free, limit)[0] for k in lengths for limit in (0.0, *THRESHOLDS))
    bound = max(drafts.decode(k, share, cost.verify, clairvoyant=True)[0] for k in (0, *lengths))
    positions = " ".join(f"{rate:.2f}" for rate in drafts.by_position())
    print(f"| {title} | {share:.2f} | {cost.needed(skipped)} | {positions} | {fixed:.2f} (K={length}, {tokens:.2f} a pass) "
          f"| {early:.2f} (K<={early_len}, {threshold}) | {unpaid:.2f} | {bound:.2f} |", flush=True)
    return drafts, early_len, threshold


def search_texts(model, args):
    from transformers import AutoTokenizer  # takes seconds, and is not needed otherwise

    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    lines = [[json.loads(line) for line in open(path)] for path in args.search]
    texts = []
    # In turn from each file, from places all over it, for all its kinds of prompts.
    for index in range(args.num):
        file = lines[index % len(lines)]
        of_file = -(-args.num // len(lines))
        line = file[(index // len(lines)) * len(file) // of_file]
        prompt = line["prompt"] if "prompt" in line else line["turns"][0]
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) <= 400:
            texts.append(Text(model, ids, len(ids), f"search {index}"))
    return texts


def judged_texts(model, args, ends):
    reference = {}
    if args.reference:
        reference = {run["name"]: run["tokens"] for run in json.loads(open(args.reference).read())["runs"][0]}
    prompts = json.loads(open(args.prompts).read())[args.tokenizer]
    texts = [Text(model, prompt["ids"] + reference.get(prompt["name"], []), len(prompt["ids"]), prompt["name"])
             for prompt in prompts]
    without = [text for text in texts if len(text.tokens) == text.num_prompt]
    if without:
        model.answer(without, 128, ends)
    for text in texts:
        found = [i for i in range(text.num_prompt, len(text.tokens)) if text.tokens[i] in ends]
        text.tokens = text.tokens[:found[0] + 1] if found else text.tokens
    return texts


def main():
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    model = Model(args.checkpoint)
    ends = json.loads((args.checkpoint / "generation_config.json").read_text())["eos_token_id"]
    ends = set(ends if isinstance(ends, list) else [ends])
    cost = Cost(model, args.verify)

    texts = judged_texts(model, args, ends)
    if args.search:
        searched, judged = search_texts(model, args), texts
        model.answer(searched, args.tokens, ends)
    else:
        searched, judged = texts[::2], texts[1::2]
        model.read(searched)
    places = [list(range(text.num_prompt, len(text.tokens) - 1)) for text in searched]
    stride = max(1, sum(map(len, places)) // args.rows)
    rows = Rows(searched, [positions[::stride] for positions in places])

    search = Search(model, cost, rows, args.tried)
    begun = time.monotonic()
    # Part of the time is kept to better the set.
    search.deadline = begun + 0.7 * 60 * args.minutes
    path = search.mlps()
    if len(path) == 1:
        raise SystemExit(f"--minutes {args.minutes} is too short: {search.num_tried} skip sets were tried, and none was chosen")
    search.deadline = begun + 60 * args.minutes
    best = max(path[1:], key=lambda skipped: cost.estimate(search.score(skipped), skipped))
    best = search.swaps(search.attentions(best))
    seconds = time.monotonic() - begun

    agreement = model.read(judged)
    of = lambda kind: sum(cost.parts[kind::2]) / cost.total
    print(f"{args.checkpoint.name}: of what a step reads, attention {of(0):.3f}, MLPs {of(1):.3f}, head "
          f"{cost.head / cost.total:.3f}. {search.num_tried} skip sets tried in {seconds:.0f} s, at "
          f"{len(rows.positions)} positions of {len(searched)} answers. Verification of 2, 3, ... rows {', '.join(map(str, args.verify[1:]))}. "
          f"The whole model in bf16 has {agreement:.4f} of the judged answers' tokens as its likeliest.\n")
    print("| skipped | cost of a draft's pass | to be accepted for 1.15x | accepted up to position 1, 2, ... "
          "| predicted, best fixed K | best early stop (K, probability) | rows to verify for nothing "
          "| drafts that know where they end |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    drafts, length, threshold = report(model, cost, "**best of the search**", best, judged, args.draft_len)
    for num in SHOWN:
        if num < len(path):
            report(model, cost, f"{num} MLPs", path[num], judged, args.draft_len)
    middle = range(2, model.num_sublayers - 2)
    every_other = frozenset(sublayer for sublayer in middle if sublayer // 2 % 2)
    report(model, cost, "every other layer", every_other, judged, args.draft_len)
    report(model, cost, "the last quarter", frozenset(middle[len(middle) * 3 // 4:]), judged, args.draft_len)

    print(f"\nBest of the search: {names(best)}\n")
    print(f"| prompt | tokens | predicted, K<={length}, stop at {threshold} | drafts that know where they end |")
    print("|---|---|---|---|")
    share = cost.draft(best)
    for text in judged:
        early = drafts.decode(length, share, cost.verify, threshold, texts=[text])[0]
        bound = max(drafts.decode(k, share, cost.verify, clairvoyant=True, texts=[text])[0]
                    for k in range(args.draft_len + 1))
        print(f"| {text.name} | {len(text.tokens) - text.num_prompt} | {early:.2f} | {bound:.2f} |")
    nothing = Drafts(model, judged, frozenset(), 2).by_position()
    print(f"\nCheck: with no sublayer skipped, {' '.join(f'{rate:.4f}' for rate in nothing)} are accepted.")


main()
