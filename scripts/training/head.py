"""Trains an EAGLE-3 head with the trainer of speculators, in rounds that go on from each other."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys

import data

# A checkpoint is saved so many times in an epoch: a run that is killed loses no more.
CHECKPOINTS_AN_EPOCH = 8
# In a round's folder: what it was begun with.
BEGUN = "begun.json"
# Of its first round; each has another order of batches.
SEED = 42
# What the target has too, unchanged: whoever loads the head takes that.
OF_TARGET = ("embed_tokens.weight",)


def prepare(folders, prepared):
    """Writes what the trainer reads; gives the share that is trained with, the tokens of it, and a hash of all."""
    import datasets
    import torch

    # Which tokens the head knows, of the first round: further ones must not change it.
    vocabulary = {path.name: path.read_bytes() for path in prepared.glob("?2?-*.npy")}
    shutil.rmtree(prepared, ignore_errors=True)
    (prepared / "hidden_states").mkdir(parents=True)
    for name, content in vocabulary.items():
        (prepared / name).write_bytes(content)
    found = data.samples(folders)
    rows, frequency, tokens, hashed = [], {}, 0, hashlib.sha256()
    for row, sample in enumerate(found):
        # Of the last token there are no hidden states.
        ids, prompt = sample["token_ids"][:-1], sample["prompt_tokens"]
        rows.append({"input_ids": ids, "loss_mask": [0] * prompt + [1] * (len(ids) - prompt), "seq_len": len(ids)})
        hashed.update(json.dumps([ids, prompt, sample["held_out"]]).encode())
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
    return (trained + 0.5) / len(found), tokens, hashed.hexdigest()


def newest(rounds):
    """The checkpoint that was saved last, if any was."""
    saved = rounds.glob("*/*/model.safetensors")
    whole = [path for path in saved if (path.parent / "config.json").exists() and not path.parent.is_symlink()]
    return max(whole, key=lambda path: path.stat().st_mtime).parent if whole else None


def flags(args, prepared, share, start, save):
    """The command line of a round of the trainer; it goes on from the head `start`, or begins."""
    import torch
    named = {
        "seed": SEED + int(save.name),
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


def has_ended(save, epochs):
    """Whether a round has come to the end of its last epoch."""
    told = [json.loads(path.read_text()) for path in save.glob("[0-9]*/training_state.json")]
    return any(state["epoch"] == epochs - 1 and state["local_step"] == 0 for state in told)


def begin(args, prepared, share, hashed):
    """A round's folder, what to say of it, and the trainer's flags: the last one's that was stopped, if all is as it was then."""
    rounds = args.output / "rounds"
    rounds.mkdir(parents=True, exist_ok=True)
    number = max((int(folder.name) for folder in rounds.iterdir()), default=-1)
    save = rounds / str(number)
    if (save / BEGUN).exists() and not has_ended(save, args.epochs):
        begun = json.loads((save / BEGUN).read_text())
        command = flags(args, prepared, share, begun["start"], save)
        if begun == {"start": begun["start"], "data": hashed, "flags": command}:
            return save, "which was stopped", command
    save, start = rounds / str(number + 1), newest(rounds)
    command = flags(args, prepared, share, start, save)
    save.mkdir()
    (save / BEGUN).write_text(json.dumps({"start": start and str(start), "data": hashed, "flags": command}))
    return save, f"from {start}" if start else "the first one", command


def run_round(args, prepared, share, hashed):
    """A round of the trainer, or the rest of one, in a process of its own; gives the checkpoint that it has left."""
    save, which, command = begin(args, prepared, share, hashed)
    log = args.output / f"round-{save.name}.log"
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}
    print(f"round {save.name}, {which}; what the trainer says is in {log}", flush=True)
    is_stopped = False
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with open(log, "ab") as out:
        # A session of its own: an interrupt from the keyboard is for this process, which asks that one to save what it has.
        process = subprocess.Popen([sys.executable, __file__, *command], env=environment, stdout=out, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        try:
            status = process.wait(args.minutes and 60 * args.minutes)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            is_stopped = True
            process.send_signal(signal.SIGTERM)
            status = process.wait()
    if status != 0 and not is_stopped:
        sys.exit(f"train-draft: the trainer ended with {status}: see {log}; the same command goes on from what it has saved")
    saved = newest(save.parent)
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
    share, tokens, hashed = prepare(args.data, args.output / "prepared")
    print(f"{tokens} tokens to train with", flush=True)
    saved = run_round(args, (args.output / "prepared").resolve(), share, hashed)
    publish(saved, args.output / "head")
    return args.output / "head"


def run_on_cpu():
    """Has the trainer run where there is no accelerator, which it takes for granted in five places."""
    import torch
    if torch.accelerator.is_available():
        return
    from speculators.train import checkpointer, dataloader, trainer
    cpu = torch.device("cpu")
    torch.accelerator.current_accelerator = lambda check_available=False: None if check_available else cpu
    torch.accelerator.synchronize = lambda *args, **kwargs: None
    trainer.get_local_rank = lambda: "cpu"
    checkpointer.get_current_device = lambda: "cpu"
    loader = dataloader.DataLoader
    dataloader.DataLoader = lambda *args, **kwargs: loader(*args, **{**kwargs, "pin_memory": False})


def save_where_it_stops():
    """Has the trainer save a head that is stopped as one that is saved on its way: so that it goes on from that very step."""
    from speculators.train.trainer import Trainer
    train_epoch, save = Trainer.train_epoch, Trainer.maybe_save_checkpoint

    def train(self, epoch, **named):
        self.epoch_now, self.steps_before = epoch, self.global_step - self._resume_local_step
        return train_epoch(self, epoch, **named)

    def save_now(self, epoch, local_step=0):
        if epoch == "interrupted" and self.global_step > self.steps_before:
            epoch, local_step = self.epoch_now, self.global_step - self.steps_before
        return save(self, epoch, local_step)

    Trainer.train_epoch, Trainer.maybe_save_checkpoint = train, save_now


def main():
    """The trainer itself, with its own flags."""
    run_on_cpu()
    save_where_it_stops()
    from speculators.train.cli import main as run
    from speculators.train.config import TrainConfig
    run(TrainConfig.resolve())


if __name__ == "__main__":
    main()
