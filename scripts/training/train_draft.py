"""The command line of scripts/train-draft: a head, or a model that drafts."""

import argparse
import pathlib
import time

import head
import model


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/train-draft", description="Trains what drafts for a target on the target's own answers.")
    parser.add_argument("--target", type=pathlib.Path, help="what the target was built from: GGUF file or Hugging Face folder")
    parser.add_argument("--model", type=pathlib.Path, metavar="CHECKPOINT",
                        help="fine-tune this small model with the target's vocabulary, in place of training a head")
    parser.add_argument("--data", type=pathlib.Path, required=True, nargs="+", metavar="DIR",
                        help="what `spec-build collect` has filled")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="gets head/ or model/, and what to go on from")
    parser.add_argument("--epochs", type=int, help="times over the data [a head: 1, a model: 3]")
    parser.add_argument("--minutes", type=float, help="end after so long")
    parser.add_argument("--lr", type=float, help="learning rate [a head: 2e-3, half of it in further rounds; a model: 2e-5]")
    parser.add_argument("--step-tokens", type=int, default=2048, help="tokens of a step [%(default)s]")
    parser.add_argument("--draft-vocab-size", type=int, default=8192,
                        help="tokens that a head knows, those that answers have most [%(default)s]")
    parser.add_argument("--layers", type=int, default=1, help="layers of a head [%(default)s]")
    args = parser.parse_args()
    if (args.target is None) == (args.model is None):
        parser.error("expected --target, to train a head of it, or --model, to fine-tune that")
    args.epochs = args.epochs or (3 if args.model else 1)
    args.lr = args.lr or (2e-5 if args.model else 2e-3)
    return args


def main():
    """Trains and says where the result is."""
    args = arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    began = time.time()
    result = (model if args.model else head).train(args)
    print(f"{result} is there after {(time.time() - began) / 60:.1f} minutes: spec-build ... --draft {result}")


if __name__ == "__main__":
    main()
