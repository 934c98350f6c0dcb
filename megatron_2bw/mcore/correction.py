"""What a working copy of the weights adds to them, with --two-bw-correction."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Correction:
    """What a working copy adds to W: `factor` x the last update, `gradient` x its last
    gradient's part; or 1 + `ahead` x the next update, as it is predicted."""

    factor: float = 0.0
    gradient: float = 0.0
    ahead: float | None = None

    def __bool__(self) -> bool:
        return self != NO_CORRECTION

    def __str__(self) -> str:
        if self.ahead is not None:
            return f"the prediction of {1 + self.ahead:g} updates"
        return f"{self.factor:g}" + (
            f" and gradient {self.gradient:g}" if self.gradient else ""
        )


NO_CORRECTION = Correction()
