"""Trains an EAGLE-3 head with the trainer of speculators, in rounds that go on from each other."""

import json
import os
import shutil
import signal
import subprocess
import sys

import data

# A checkpoint is saved so many times in an epoch: a run that is killed loses no more.
CHECKPOINTS_AN_EPOCH = 8
# What the target has too, unchanged: whoever loads the head takes that.
OF_TARGET = ("embed_tokens.weight",)


def prepare(folders, prepared):
    """Writes what the trainer reads; gives the share that is trained with and the tokens of it."""
    import datasets
    import torch

    # Which tokens the head knows, of the first round: further ones must not change it.
    vocabulary = {path.name: path.read_bytes() for path in prepared.glob("?2?-*.npy")}
    shutil.rmtree(prepared, ignore_errors=True)
    (prepared / "hidden_states").mkdir(parents=True)
    for name, content in vocabulary.items():
        (prepared / name).write_bytes(content)
    found = data.samples(folders)
    rows, frequency, tokens = [], {}, 0
    for row, sample in enumerate(found):
        # Of the last token there are no hidden states.
        ids, prompt = sample["token_ids"][:-1], sample["prompt_tokens"]
        rows.append({"input_ids": ids, "loss_mask": [0] * prompt + [1] * (len(ids) - prompt), "seq_len": len(ids)})
        (prepared / "hidden_states" / f"hs_{row}.safetensors").symlink_to(sample["states"])
        if not sample["held_out"]:
            tokens += len(ids)
            for token in sample["token_ids"][prompt:]:
                frequency[token] = frequency.get(token, 0) + 1
    trained = sum(not sample["held_out"] for sample in found)
    if trained in (0, len(found)):
        sys.exit(f"train-draft: {data.names(folders)} has {trained} of {len(found)} samples to train with: some are needed, and some held out")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).with_format("torch").save_to_disk(prepared)
    torch.save(frequency, prepared / "token_freq.pt")
    # The trainer splits by place and rounds down what this share of all gives.
    return (trained + 0.5) / len(found), tokens


def newest(rounds):
    """The checkpoint that was saved last, if any was."""
    saved = rounds.glob("*/*/model.safetensors")
    whole = [path for path in saved if (path.parent / "config.json").exists() and not path.parent.is_symlink()]
    return max(whole, key=lambda path: path.stat().st_mtime).parent if whole else None


def flags(args, prepared, share, start, save):
    """The trainer's command line; it goes on from `start`, or begins."""
    import torch
    named = {
        "verifier-name-or-path": data.hugging_face(args.target, args.output / "target").resolve(), "speculator-type": "eagle3",
        "data-path": prepared, "train-data-ratio": share, "on-missing": "raise", "total-seq-len": args.step_tokens,
        "num-workers": 0, "epochs": args.epochs, "save-path": save, "checkpoint-freq": 1 / CHECKPOINTS_AN_EPOCH,
        "lr": args.lr if start is None else args.lr / 2, "scheduler-warmup-ratio": 0.05,
        "target-layer-ids": data.layers(args.data)[:-1], "draft-vocab-size": args.draft_vocab_size,
    }
    if not torch.accelerator.is_available():
        # The usual ones are kernels for GPUs.
        named |= {"draft-attn-impl": "sdpa", "loss-implementation": "eager"}
    if start is None:
        named |= {"num-layers": args.layers, "full-attention-indices": range(args.layers)}
    else:
        # The tokens that the head knows are settled.
        named |= {"from-pretrained": start}
    command = []
    for name, value in named.items():
        command += [f"--{name}", *map(str, value if isinstance(value, (list, range)) else [value])]
    return command


def run_round(args, prepared, share, start):
    """One round of the trainer, in a process of its own; gives the checkpoint that it has left."""
    rounds = args.output / "rounds"
    rounds.mkdir(parents=True, exist_ok=True)
    number = len(list(rounds.iterdir()))
    save, log = rounds / str(number), args.output / f"round-{number}.log"
    command = [sys.executable, __file__, *flags(args, prepared, share, start, save)]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}
    print(f"round {number}, {f'from {start}' if start else 'the first one'}; what the trainer says is in {log}", flush=True)
    with open(log, "wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            status = process.wait(args.minutes and 60 * args.minutes)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.send_signal(signal.SIGTERM)  # It saves what it has.
            status = process.wait()
    saved = newest(rounds)
    if saved is None or saved.parent != save:
        sys.exit(f"train-draft: the trainer ended with {status} and saved nothing: see {log}")
    return saved


def publish(checkpoint, head):
    """Puts the two files of a head where they are to be found, and nothing beside them."""
    from safetensors.torch import load_file, save_file

    partial = head.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = load_file(checkpoint / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name not in OF_TARGET}, partial / "model.safetensors")
    shutil.copy(checkpoint / "config.json", partial)
    shutil.rmtree(head, ignore_errors=True)
    partial.rename(head)


def train(args):
    """A round, from the data to the head; gives its folder."""
    share, tokens = prepare(args.data, args.output / "prepared")
    print(f"{tokens} tokens to train with", flush=True)
    saved = run_round(args, (args.output / "prepared").resolve(), share, newest(args.output / "rounds"))
    publish(saved, args.output / "head")
    return args.output / "head"


def run_on_cpu():
    """Has the trainer run where there is no accelerator, which it takes for granted in four places."""
    import torch
    if torch.accelerator.is_available():
        return
    from speculators.train import dataloader, trainer
    cpu = torch.device("cpu")
    torch.accelerator.current_accelerator = lambda check_available=False: None if check_available else cpu
    torch.accelerator.synchronize = lambda *args, **kwargs: None
    trainer.get_local_rank = lambda: "cpu"
    loader = dataloader.DataLoader
    dataloader.DataLoader = lambda *args, **kwargs: loader(*args, **{**kwargs, "pin_memory": False})


def main():
    """The trainer itself, with its own flags."""
    run_on_cpu()
    from speculators.train.cli import main as run
    from speculators.train.config import TrainConfig
    run(TrainConfig.resolve())


if __name__ == "__main__":
    main()
