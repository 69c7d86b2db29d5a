"""Every test and every example in the docs starts from the same seed, on one thread (two processes run at once)."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
