"""Every test and every example in the docs starts from the same seed, on one thread (two processes run at once).

Property tests try the same examples every time; HYPOTHESIS_PROFILE=explore looks for new ones.
"""

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import settings

collect_ignore = ["tests/foreign_files.py"]  # a script, which its test runs in a process of limited memory
torch.set_num_threads(1)
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is first imported; its kernels then run on the CPU


@pytest.fixture(autouse=True)
def _steady():
    torch.set_num_threads(1)  # a test before may have set more
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  # scikit-learn draws from it where an estimator has no random_state
    random.seed(0)
