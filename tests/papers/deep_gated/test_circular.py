"""Figure 9 and section 4: identities that hold at any size."""

import pytest


@pytest.mark.parametrize("name", ["dgn.fig9", "dgn.conv"])
def test_exact_claims_hold(on_synthetic, name):
    assert on_synthetic(name).verdict == "reproduced"
