"""What a working copy of the weights adds to them, with --two-bw-correction."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Correction:
    """What a working copy adds to W: `factor` x the last update, `gradient` x its last
    gradient's part."""

    factor: float = 0.0
    gradient: float = 0.0

    def __bool__(self) -> bool:
        return self != NO_CORRECTION

    def __str__(self) -> str:
        return f"{self.factor:g}" + (
            f" and gradient {self.gradient:g}" if self.gradient else ""
        )


NO_CORRECTION = Correction()
