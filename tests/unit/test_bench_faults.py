"""What bench/faults.py takes for a difference, and what not."""

from __future__ import annotations

from bench.faults import different_losses

START = "[before the start of training step] datetime: 2026-01-01"


def line(iteration: int, loss: str | None) -> str:
    return f" [2026] iteration {iteration:8}/       6 | consumed samples: 8 |" + (f" lm loss: {loss} |" if loss else "")


PEACE = [
    START,
    line(1, "4.000000E+00"),
    line(2, "3.900000E+00"),
    line(3, "3.600000E+00"),
    line(4, "0.000000E+00"),
    " validation loss at iteration 4 | lm loss value: 3.500000E+00 | lm loss PPL: 1",
    line(5, "3.200000E+00"),
    line(6, "3.000000E+00"),
]


def resumed(*lines: str) -> list[str]:
    return [*PEACE[:3], START, *lines]


def test_no_difference():
    assert different_losses(PEACE, PEACE) == []
    rest = resumed(line(3, "3.600000E+00"), line(4, "3.600000E+00"), *PEACE[5:7])  # line 4 is a mean
    rest += [START, line(4, None), line(5, "3.200000E+00"), line(6, "3.000000E+00")]
    assert different_losses(rest, PEACE) == []


def test_differences():
    again = resumed(line(3, "3.600001E+00"), *PEACE[4:])
    assert different_losses(again, PEACE) == ["iteration 3: lm loss 3.600001E+00"]
    rest = [*PEACE[:5], PEACE[5].replace("3.500000", "3.500001"), *PEACE[6:]]
    assert different_losses(rest, PEACE) == ["iteration 4: validation loss 3.500001E+00"]
    assert different_losses(PEACE[:-1], PEACE) == ["iteration 6: no lm loss"]
