"""Every test and every example in the docs starts from the same seed, on one thread (two processes run at once)."""

import os

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is first imported; its kernels then run on the CPU


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
