"""Counts what held, for scripts that test what is deployed."""

import subprocess
import sys
import time

# Until something that must come has come: long enough for a machine that hardly runs.
PATIENCE_SECONDS = 600
POLL_SECONDS = 0.5


class Checks:
    """What held and what did not; a line for each, and one that counts at the end."""

    def __init__(self):
        self.passed = self.failed = 0

    def __call__(self, what, holds, why=""):
        self.passed, self.failed = self.passed + bool(holds), self.failed + (not holds)
        print(f"{'ok' if holds else 'FAILED'}  {what}{'' if holds or not why else f': {why}'}", flush=True)

    def command(self, what, *command):
        """Holds if the command succeeds."""
        run = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self(what, run.returncode == 0, run.stdout)

    def eventually(self, what, holds):
        """Holds if it does before patience ends; `holds` gives None, or why not yet."""
        end = time.monotonic() + PATIENCE_SECONDS
        while (why := holds()) is not None and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        self(what, why is None, why)

    def end(self):
        """Ends the script."""
        print(f"{self.passed} passed, {self.failed} failed")
        sys.exit(bool(self.failed))
