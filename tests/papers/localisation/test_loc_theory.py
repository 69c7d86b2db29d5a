"""Closed forms, exact flows and searched gates at small sizes."""


def test_closed_forms_and_exact_flows_hold_at_any_size(artifact):
    for claim in artifact("loc.flow").claims:
        assert all(claim.met), (claim.row, claim.text, claim.measured)
    assert all(artifact("loc.evolving").claims[0].met)


def test_gates_are_scored_on_held_out_rows(artifact):
    losses = artifact("loc.gates").metrics["least test loss"]
    assert set(losses) == {"random", "tiling", "greedy", "soft", "network"}
    assert all(0 < v < 0.6 for values in losses.values() for v in values)
