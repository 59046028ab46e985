"""What `spec-build collect` has filled, and the models that it is about."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SPEC_BUILD = pathlib.Path(os.environ.get("SPEC_BUILD", ROOT / "target/release/spec-build"))


def samples(folders):
    """The samples, those to train with before those that are held out, each with where its states are."""
    found = []
    for folder in folders:
        with open(folder / "samples.jsonl") as lines:
            # The last line may be on its way.
            for sample in (json.loads(line) for line in lines if line.endswith("\n")):
                states = folder / "hidden_states" / f"hs_{sample['sample']}.safetensors"
                found.append({**sample, "states": states.resolve()})
    return sorted(found, key=lambda sample: sample["held_out"])


def names(folders):
    """The folders, for messages."""
    return ", ".join(map(str, folders))


def layers(folders):
    """The layers whose hidden states were taken; the last one is that of the final norm."""
    read = lambda folder: json.loads((folder / "collected.json").read_text())
    first = read(folders[0])
    for folder in folders[1:]:
        for name in ("target", "layers"):
            if read(folder)[name] != first[name]:
                sys.exit(f"train-draft: {name} is {first[name]} in {folders[0]} and {read(folder)[name]} in {folder}")
    return first["layers"]


def hugging_face(checkpoint, folder):
    """A checkpoint as a Hugging Face folder; one that is a GGUF file is exported to `folder`."""
    if checkpoint.is_dir():
        return checkpoint
    if not folder.exists():
        subprocess.run([SPEC_BUILD, "export", checkpoint, "--output", folder], check=True)
    return folder
