"""The server of ranks that compute on the stand-in: as any on GPUs, and the host
computes what kernels would."""

import megatron_2bw.run.start.preload  # noqa: F401
from tests.device import values

values.install()
