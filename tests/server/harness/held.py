"""A model kept busy: one request has begun, and gets no further until it is let go."""

from . import client
from .server import eventually


class Held:
    """Within the block `stream` runs and stands still, behind as many steps as are given; the model does what needs no
    step. It is over with the block: the model is empty then. `server` was started with `gates`.
    """

    def __init__(self, server, model, options, *, steps=1, **how):
        self.server, self.model, self.options, self.steps, self.how = server, model, options, steps, how

    def __enter__(self):
        self.gate = self.server.gate(self.model)
        self.gate.let_pass(self.steps)
        self.send()
        eventually(self.runs, what=f"{self.model}: one runs")
        return self

    def send(self):
        self.stream = client.Stream(self.server, self.model, self.options, **self.how)

    def runs(self):
        """Whether it does; sent again where it waited longer for its first step than the queue allows."""
        if self.server.requests(self.model, "scheduled") == 1:
            return True
        if self.stream.is_over_time():
            self.stream.close()
            self.send()
        return False

    def waiting(self, count):
        """Returns when so many requests wait."""
        eventually(lambda: self.server.requests(self.model, "waiting") == count, what=f"{count} wait")

    def go(self):
        """Lets those that wait run in place of it."""
        self.stream.cancel()
        self.gate.open()

    def __exit__(self, *_):
        self.go()
        eventually(lambda: self.server.pages(self.model, "used") == 0, what=f"{self.model}: empty again")
