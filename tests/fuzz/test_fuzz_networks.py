"""A hundred random networks, each under some of the public functions, against brute force.

`make fuzz-networks` tries more of them.
"""

from __future__ import annotations

import pytest
from network_checks import CHECKS, case_of, describe, try_check, try_network
from random_networks import draw

_CHUNKS, _EACH = 10, 10


@pytest.mark.parametrize("chunk", range(_CHUNKS))
def test_no_function_is_wrong_on_a_random_network(chunk):
    failures = []
    for seed in range(chunk * _EACH, (chunk + 1) * _EACH):
        failures += [describe(drawn, o) for drawn, o in try_network(seed, checks=7) if o.kind == "wrong"]
    assert not failures, "\n".join(failures)


def test_a_seed_gives_one_network():
    first, again = draw(7), draw(7)
    assert first.text == again.text
    assert (first.net(first.x.clone()) == again.net(again.x.clone())).all()


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_gets_an_answer_from_some_network(name):
    """A check that is always refused compares nothing."""
    for seed in range(100):
        if try_check(case_of(seed, name), name).kind == "right":
            return
    pytest.fail(f"{name}: no network of a hundred gave an answer")
