"""The trainer behind scripts/train-draft: data for it, rounds of it, and what each round has brought."""

import argparse
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SPEC_BUILD = pathlib.Path(os.environ.get("SPEC_BUILD", ROOT / "target/release/spec-build"))
# A checkpoint is saved so many times in an epoch: a run that is killed loses no more.
CHECKPOINTS_AN_EPOCH = 8


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/train-draft", description="Trains a draft head (EAGLE-3) on a target's own answers.")
    parser.add_argument("--target", type=pathlib.Path, required=True, help="GGUF file or Hugging Face folder")
    parser.add_argument("--data", type=pathlib.Path, required=True, help="what `spec-build collect` has filled")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="gets head/, and rounds/ to go on from")
    parser.add_argument("--epochs", type=int, default=1, help="times over the data in this round [%(default)s]")
    parser.add_argument("--minutes", type=float, help="end the round after so long")
    parser.add_argument("--draft-vocab-size", type=int, default=8192,
                        help="tokens that the head knows, those that answers have most [%(default)s]")
    parser.add_argument("--lr", type=float, default=2e-3, help="of the first round; further ones have half [%(default)s]")
    parser.add_argument("--step-tokens", type=int, default=2048, help="tokens of a step of the trainer [%(default)s]")
    parser.add_argument("--layers", type=int, default=1, help="layers of the head [%(default)s]")
    return parser.parse_args()


def samples(data):
    """The samples, those to train with before those that are held out: the trainer splits them by place."""
    with open(data / "samples.jsonl") as lines:
        # The last line may be on its way.
        found = [json.loads(line) for line in lines if line.endswith("\n")]
    return sorted(found, key=lambda sample: sample["held_out"])


def prepare(data, folder):
    """Writes what the trainer reads; gives the share that is trained with and the tokens of it."""
    import datasets
    import torch

    shutil.rmtree(folder, ignore_errors=True)
    (folder / "hidden_states").mkdir(parents=True)
    found = samples(data)
    rows, frequency, tokens = [], {}, 0
    for row, sample in enumerate(found):
        # Of the last token there are no hidden states.
        ids, prompt = sample["token_ids"][:-1], sample["prompt_tokens"]
        rows.append({"input_ids": ids, "loss_mask": [0] * prompt + [1] * (len(ids) - prompt), "seq_len": len(ids)})
        states = (data / "hidden_states" / f"hs_{sample['sample']}.safetensors").resolve()
        (folder / "hidden_states" / f"hs_{row}.safetensors").symlink_to(states)
        if not sample["held_out"]:
            tokens += len(ids)
            for token in sample["token_ids"][prompt:]:
                frequency[token] = frequency.get(token, 0) + 1
    trained = sum(not sample["held_out"] for sample in found)
    if trained in (0, len(found)):
        sys.exit(f"train-draft: {data} has {trained} of {len(found)} samples to train with: some, and some held out, are needed")
    datasets.Dataset.from_list(rows).with_format("torch").save_to_disk(folder)
    torch.save(frequency, folder / "token_freq.pt")
    # The trainer cuts down what this share of all gives.
    return (trained + 0.5) / len(found), tokens


def verifier(target, output):
    """The target as a Hugging Face folder."""
    if target.is_dir():
        return target
    folder = output / "target"
    if not folder.exists():
        subprocess.run([SPEC_BUILD, "export", target, "--output", folder], check=True)
    return folder


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


def newest(rounds):
    """The checkpoint that was saved last, if any was."""
    saved = rounds.glob("*/*/model.safetensors")
    whole = [path for path in saved if (path.parent / "config.json").exists() and not path.parent.is_symlink()]
    return max(whole, key=lambda path: path.stat().st_mtime).parent if whole else None


def train(args, prepared, share, start):
    """One round of the trainer, in a process of its own: it goes on from `start`, or begins."""
    rounds = args.output / "rounds"
    number = len(list(rounds.iterdir())) if rounds.exists() else 0
    save = rounds / str(number)
    with_accelerator = subprocess.run(
        [sys.executable, "-c", "import torch; raise SystemExit(not torch.accelerator.is_available())"]).returncode == 0
    flags = {
        "verifier-name-or-path": verifier(args.target, args.output), "speculator-type": "eagle3", "data-path": prepared,
        "train-data-ratio": share, "on-missing": "raise", "total-seq-len": args.step_tokens, "num-workers": 0,
        "epochs": args.epochs, "save-path": save, "checkpoint-freq": 1 / CHECKPOINTS_AN_EPOCH,
        "lr": args.lr if start is None else args.lr / 2, "scheduler-warmup-ratio": 0.05,
    }
    if not with_accelerator:
        # What these are without: kernels that are written for a GPU.
        flags |= {"draft-attn-impl": "sdpa", "loss-implementation": "eager"}
    layers = json.loads((args.data / "collected.json").read_text())["layers"]
    flags["target-layer-ids"] = layers[:-1]
    flags["draft-vocab-size"] = args.draft_vocab_size
    if start is None:
        flags |= {"num-layers": args.layers, "full-attention-indices": list(range(args.layers))}
    else:
        flags["from-pretrained"] = start
    command = [sys.executable, __file__, "--trainer"]
    for name, value in flags.items():
        command += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}
    (args.output / "rounds").mkdir(parents=True, exist_ok=True)
    log = args.output / f"round-{number}.log"
    print(f"round {number}, {'from ' + str(start) if start else 'the first one'}; the trainer's words are in {log}", flush=True)
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
    partial = head.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(checkpoint / name, partial)
    shutil.rmtree(head, ignore_errors=True)
    partial.rename(head)


def main():
    """Prepares, trains, publishes, tells."""
    args = arguments()
    began = time.time()
    share, tokens = prepare(args.data, args.output / "prepared")
    print(f"{tokens} tokens to train with", flush=True)
    saved = train(args, (args.output / "prepared").resolve(), share, newest(args.output / "rounds"))
    publish(saved, args.output / "head")
    print(f"{args.output / 'head'} is the head, after {(time.time() - began) / 60:.0f} minutes")


def trainer():
    """The trainer itself, with its own flags."""
    run_on_cpu()
    from speculators.train.cli import main as run
    from speculators.train.config import TrainConfig
    run(TrainConfig.resolve())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trainer"]:
        del sys.argv[1]
        trainer()
    else:
        main()
