"""Fine-tunes a small model that drafts on a target's own answers."""

import json
import random
import shutil
import sys
import time

import data

# Checkpoints in an epoch: a run that is killed loses no more.
CHECKPOINTS_AN_EPOCH = 8
WARM_UP = 0.05
# Samples that are looked at to tell what was gained.
MEASURED = 32
# Beside the weights: what is no tensor stays as it was.
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def loss_and_hits(model, sample):
    """Cross entropy over a sample's answer, and in how many of its tokens the model's likeliest is the target's."""
    import torch
    ids, prompt = torch.tensor(sample["token_ids"]), sample["prompt_tokens"]
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        # Only the answer's logits: those of the last token are of nothing.
        logits = model(ids[None, :-1].to(model.device), logits_to_keep=len(ids) - prompt).logits[0].float()
    answer = ids[prompt:].to(model.device)
    hits = (logits.argmax(-1) == answer).sum().item()
    return torch.nn.functional.cross_entropy(logits, answer, reduction="sum"), hits, len(answer)


def share_hit(model, samples):
    """Share of answers' tokens that the model's likeliest token is."""
    import torch
    model.eval()
    with torch.inference_mode():
        found = [loss_and_hits(model, sample)[1:] for sample in samples]
    return sum(hits for hits, _ in found) / max(sum(tokens for _, tokens in found), 1)


def steps(samples, step_tokens, epochs):
    """Samples by step, of all epochs: the same ones whenever a run goes on."""
    order = random.Random(0)
    all_steps = []
    for _ in range(epochs):
        shuffled = samples[:]
        order.shuffle(shuffled)
        step, tokens = [], 0
        for sample in shuffled:
            step.append(sample)
            tokens += len(sample["token_ids"])
            if tokens >= step_tokens:
                all_steps.append(step)
                step, tokens = [], 0
    return all_steps


def save(model, optimizer, step, folder):
    """A checkpoint, whole or not at all."""
    import torch
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    torch.save(optimizer.state_dict(), partial / "optimizer.pt")
    (partial / "step.json").write_text(json.dumps(step))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def train(args):
    """Trains, from where it was; gives the model's folder."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging
    logging.disable_progress_bar()

    source = data.hugging_face(args.model, args.output / "source")
    found = data.samples(args.data)
    trained = [sample for sample in found if not sample["held_out"]]
    held_out = [sample for sample in found if sample["held_out"]][:MEASURED]
    if not trained or not held_out:
        sys.exit(f"train-draft: {data.names(args.data)} has {len(trained)} of {len(found)} samples to train with: some are needed, and some held out")
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    checkpoint = args.output / "checkpoint"
    start = json.loads((checkpoint / "step.json").read_text()) if checkpoint.exists() else 0
    load = lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    model = load(source)
    largest = max(max(sample["token_ids"]) for sample in found)
    if largest >= model.config.vocab_size:
        sys.exit(f"train-draft: the target says token {largest}, {args.model} knows {model.config.vocab_size}: not of one vocabulary")
    before = share_hit(model, held_out)
    model = load(checkpoint) if start else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if start:
        optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", weights_only=True))
    all_steps = steps(trained, args.step_tokens, args.epochs)
    if not all_steps:
        sys.exit(f"train-draft: {data.names(args.data)} has fewer than the {args.step_tokens} tokens of a step: see --step-tokens")
    warm = max(1, round(WARM_UP * len(all_steps)))
    every = max(1, len(all_steps) // args.epochs // CHECKPOINTS_AN_EPOCH)
    end = time.time() + 60 * args.minutes if args.minutes else float("inf")
    for number in range(start, len(all_steps)):
        model.train()
        rate = min((number + 1) / warm, (len(all_steps) - number) / max(1, len(all_steps) - warm))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate
        answers = sum(len(sample["token_ids"]) - sample["prompt_tokens"] for sample in all_steps[number])
        total = 0.0
        for sample in all_steps[number]:
            loss = loss_and_hits(model, sample)[0] / answers
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        last = number + 1 == len(all_steps) or time.time() > end
        if last or (number + 1) % every == 0:
            print(f"step {number + 1} of {len(all_steps)}, loss {total:.3f}", flush=True)
            save(model, optimizer, number + 1, checkpoint)
        if last:
            break
    after = share_hit(model, held_out)
    print(f"on {len(held_out)} answers that were not trained on, its likeliest token is the target's {after:.3f} of the time, "
          f"{before:.3f} before")
    result = args.output / "model"
    model.to(torch.bfloat16).save_pretrained(result)
    for name in TOKENIZER:
        if (source / name).exists():
            shutil.copy(source / name, result)
    return result
