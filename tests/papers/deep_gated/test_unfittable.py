"""Two points that no ReLU network fits, small."""


def test_hard_gates_do_not_get_below_the_floor(on_synthetic):
    assert all(on_synthetic("dgn.unfittable").claims[0].met)
