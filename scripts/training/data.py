"""What `spec-build collect` has filled, and the models that it is about."""

import json
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SPEC_BUILD = pathlib.Path(os.environ.get("SPEC_BUILD", ROOT / "target/release/spec-build"))


def samples(folder):
    """The samples, those to train with before those that are held out."""
    with open(folder / "samples.jsonl") as lines:
        # The last line may be on its way.
        found = [json.loads(line) for line in lines if line.endswith("\n")]
    return sorted(found, key=lambda sample: sample["held_out"])


def layers(folder):
    """The layers whose hidden states were taken; the last one is that of the final norm."""
    return json.loads((folder / "collected.json").read_text())["layers"]


def hugging_face(checkpoint, folder):
    """A checkpoint as a Hugging Face folder; one that is a GGUF file is exported to `folder`."""
    if checkpoint.is_dir():
        return checkpoint
    if not folder.exists():
        subprocess.run([SPEC_BUILD, "export", checkpoint, "--output", folder], check=True)
    return folder
