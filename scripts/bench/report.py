"""What a result carries beside its figures, and where it is written."""

import datetime
import json
import math
import os
import pathlib
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results"


def machine():
    """What the numbers depend on."""
    cpu = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12"],
                            capture_output=True, text=True).stdout.strip()
    return {"cpu": cpu[0] if cpu else "unknown", "cores": os.cpu_count(), "commit": commit}


def heading():
    """Date and machine, the beginning of every result."""
    return {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), **machine()}


def path(result, kind, folder):
    """Where a result of this kind belongs."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{result['date'][:16].replace(':', '')}-{kind}.json"


def save(result, kind, folder=RESULTS):
    """Writes a result and says where."""
    file = path(result, kind, folder)
    file.write_text(json.dumps(result) + "\n")
    print(f"\nWritten to {file.name}.")


def percentile(values, share):
    """The smallest value that `share` of the values do not exceed; NaN of none."""
    values = sorted(values)
    return values[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan
