"""What an answer must be: that of `spec-build try` for the same parameters, remembered on disk."""

import fcntl
import hashlib
import json
import subprocess

from . import places

_SCALARS = {
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens", "seed", "logprobs",
}
_LISTS = {"bad_words": "bad-word", "stop_words": "stop"}


def _arguments(options):
    """Options of the text profile as `try` spells them. The draft length is left out: it changes no text."""
    arguments = []
    for name, value in options.items():
        if name in _SCALARS:
            arguments.append(f"--{name.replace('_', '-')}={value}")
        elif name in _LISTS:
            arguments += [f"--{_LISTS[name]}={one}" for one in value]
        elif name == "ignore_eos":
            arguments += ["--ignore-eos"] * value
        elif name == "text_input":
            arguments.append(f"--prompt={value}")
        elif name == "chat":
            arguments += ["--chat", f"--prompt={value[-1]}", *(f"--system={one}" for one in value[:-1])]
        elif name not in ("num_draft_tokens", "fixed_draft_tokens", "stream"):
            raise KeyError(f"`try` has no {name}")
    return arguments


class Reference:
    """Expected answers of one engine."""

    def __init__(self, engine):
        self.engine = engine
        program = places.spec_build()
        self.stamp = f"{engine.name} {program.stat().st_mtime_ns} {program.stat().st_size}"
        self.folder = places.CACHE / "server-reference"
        self.folder.mkdir(parents=True, exist_ok=True)

    def ask(self, draft_len=0, **options):
        """The JSON object of `try`."""
        arguments = [*_arguments(options), f"--draft-len={draft_len}", "--json"]
        key = hashlib.sha256("\0".join([self.stamp, *arguments]).encode()).hexdigest()[:32]
        file = self.folder / f"{key}.json"
        if not file.is_file():
            with open(self.folder / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not file.is_file():
                    self._run(arguments, file)
        return json.loads(file.read_text())

    def _run(self, arguments, file):
        """The file appears whole: other threads and processes look for it without the lock."""
        run = subprocess.run([places.spec_build(), "try", self.engine, *arguments], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        partial = file.with_suffix(".partial")
        partial.write_text(run.stdout)
        partial.rename(file)

    def text(self, **options):
        return self.ask(**options)["text"]
