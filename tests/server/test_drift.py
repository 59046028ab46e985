"""The server's log says when drafts have come to fit less than they did, and when they fit again."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from harness import client
from harness.repository import Model
from harness.server import eventually

# Answers of a round. All their steps have a draft, of one token, so a round has some nine hundred.
NUM_ANSWERS, TOKENS = 32, 55
REPEATS = "1, 2, 3, 4, " * 5
# So hot that each of the two likeliest tokens comes as often: what is looked up is right half of the time.
COIN = {"temperature": 100.0, "top_k": 2}
FITS_LESS, FITS_AGAIN = "drafts fit less than they did", "drafts fit as before again"


@pytest.fixture(scope="module")
def server(serve, small_engine):
    return serve([Model("drifts", small_engine, parameters={"draft_len": 1})])


def answers(server, **sampling):
    """A round of answers, alike but for their seeds."""
    def answer(seed):
        options = {"text_input": REPEATS, "max_tokens": TOKENS, "ignore_eos": True, "seed": seed, **sampling}
        assert client.grpc_stream(server, "drifts", options).good()

    with ThreadPoolExecutor(NUM_ANSWERS) as pool:
        list(pool.map(answer, range(NUM_ANSWERS)))


def test_a_drop_is_told_and_so_is_its_end(server):
    for _ in range(4):
        answers(server)
    assert FITS_LESS not in server.log

    def until(words, **sampling):
        """More of these answers, until it is told."""
        for _ in range(6):
            answers(server, **sampling)
            if words in server.log:
                return
        raise AssertionError(f"nothing of {words!r} in {server.log_path}")

    until(FITS_LESS, **COIN)
    assert FITS_AGAIN not in server.log
    until(FITS_AGAIN)
    eventually(lambda: server.log.count(FITS_LESS) == 1, what="one word of each")
