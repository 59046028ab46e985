"""How far engines are from a reference, behind every token of some texts but the first; run by quality_of.py, which has no
numpy. Behind the first token alone a model has nothing to attend to but that token: its hidden state is huge and what comes
next is decided by rounding, so that one position of a text would outweigh all others.

    divergence.py <REQUEST >ANSWER

REQUEST is {"texts": [[id, ...], ...], "reference": COMMAND, "engines": {LABEL: {"command": COMMAND, "env": {...} or null}}};
commands read and write as llama_logits.cpp does. ANSWER is {LABEL: {"mean": nats, "p99": nats, "same_argmax": share,
"positions": count} or {"error": text}}.
"""

import itertools
import json
import struct
import subprocess
import sys
import threading

import numpy


def encoded(texts):
    """The texts as the commands read them."""
    return b"".join(struct.pack(f"<{len(ids) + 1}I", len(ids), *ids) for ids in texts)


class Rows:
    """The rows of logits that a command writes, one after the other: the whole of one engine's does not have to fit."""

    def __init__(self, texts, command, env=None):
        self.num_rows = sum(map(len, texts))
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        # It may write before it has read all.
        self.writer = threading.Thread(target=self.feed, args=(encoded(texts),))
        self.writer.start()

    def feed(self, data):
        """Gives the texts; a command that ended early says why by its exit status."""
        try:
            with self.process.stdin as pipe:
                pipe.write(data)
        except BrokenPipeError:
            pass

    def read(self, vocab_size):
        """The rows."""
        for row in range(self.num_rows):
            data = self.process.stdout.read(4 * vocab_size)
            if len(data) < 4 * vocab_size:
                raise ValueError(f"{row} rows of {vocab_size} logits instead of {self.num_rows}")
            yield numpy.frombuffer(data, "<f4")
        if self.process.stdout.read(1):
            raise ValueError(f"more than {self.num_rows} rows of {vocab_size} logits")

    def all(self):
        """The whole, [positions, vocabulary]."""
        values = numpy.frombuffer(self.process.stdout.read(), "<f4")
        if not len(values) or len(values) % self.num_rows:
            raise ValueError(f"{len(values)} logits are not {self.num_rows} rows")
        return values.reshape(self.num_rows, -1)

    def close(self):
        """Ends the command; its status."""
        self.process.stdout.close()
        self.writer.join()
        return self.process.wait()


def log_probs(logits):
    """Logarithms of probabilities."""
    logits = logits.astype(numpy.float64)
    logits -= logits.max()
    return logits - numpy.log(numpy.exp(logits).sum())


def first_rows(texts):
    """The numbers of the rows behind the first tokens of texts."""
    return {0, *itertools.accumulate(map(len, texts))}


def compare(texts, reference, rows):
    """Kullback-Leibler divergence of the rows' distributions from those of the reference, position by position."""
    nats, same, left_out = [], 0, first_rows(texts)
    for number, (expected, row) in enumerate(zip(reference, rows.read(reference.shape[1]), strict=True)):
        if number in left_out:
            continue
        p, q = log_probs(expected), log_probs(row)
        nats.append(float((numpy.exp(p) * (p - q)).sum()))
        same += int(expected.argmax() == row.argmax())
    nats.sort()
    return {"mean": sum(nats) / len(nats), "p99": nats[len(nats) * 99 // 100], "same_argmax": same / len(nats),
            "positions": len(nats)}


def measure(texts, reference, engine):
    """The answer for one engine."""
    rows = Rows(texts, engine["command"], engine["env"])
    try:
        answer = compare(texts, reference, rows)
    except ValueError as why:
        answer = {"error": str(why)}
    if status := rows.close():
        answer = {"error": f"{answer.get('error', 'all rows')}, exit status {status}"}
    return answer


def main():
    """Answers one request."""
    request = json.load(sys.stdin)
    texts = request["texts"]
    rows = Rows(texts, request["reference"])
    reference = rows.all()
    if rows.close():
        sys.exit("divergence: the reference has failed, see above")
    answers = {}
    for label, engine in request["engines"].items():
        answers[label] = measure(texts, reference, engine)
        print(f"divergence: {label}: {answers[label]}", file=sys.stderr)
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
