"""Model repositories: folders with a config.pbtxt of the test's own and links to a built engine."""

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path


def quoted(value):
    """A string as protobuf text has it; JSON's escapes are among those that it knows."""
    return json.dumps(str(value))


@dataclass
class Model:
    """A model of a repository. `extra` is put into config.pbtxt as it is. Models of other backends have no engine: None."""

    name: str
    engine: Path
    decoupled: bool = True
    max_batch_size: int = 32
    instances: int = 1
    kind: str = "KIND_CPU"
    parameters: dict = field(default_factory=dict)
    extra: str = ""
    backend: str = "spec"

    def config(self):
        lines = [
            f"name: {quoted(self.name)}",
            f"backend: {quoted(self.backend)}",
            f"max_batch_size: {self.max_batch_size}",
            f"model_transaction_policy {{ decoupled: {str(self.decoupled).lower()} }}",
            f"instance_group [ {{ count: {self.instances} kind: {self.kind} }} ]",
        ]
        for key, value in self.parameters.items():
            lines.append(f"parameters {{ key: {quoted(key)} value {{ string_value: {quoted(value)} }} }}")
        return "\n".join([*lines, self.extra]) + "\n"


class Repository:
    """A folder that tritonserver reads models from."""

    def __init__(self, path):
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)

    def add(self, model):
        """Writes a model, or writes it anew."""
        folder = self.path / model.name
        version = folder / "1"
        version.mkdir(parents=True, exist_ok=True)
        for file in (model.engine / "1").iterdir() if model.engine else []:
            link = version / file.name
            link.unlink(missing_ok=True)
            os.symlink(file, link)
        self.configure(model.name, model.config())
        return model

    def configure(self, name, text):
        (self.path / name / "config.pbtxt").write_text(text)

    def damage(self, name):
        """Puts an engine file of the same length in place whose header says nothing."""
        engine = self.path / name / "1" / "target.engine"
        size = min(engine.stat().st_size, 1 << 20)
        engine.unlink()
        engine.write_bytes(b"\x7fnot an engine" + bytes(size - 14))

    def remove(self, name):
        shutil.rmtree(self.path / name)
