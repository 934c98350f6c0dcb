"""Results that are computed once a session, whichever worker of pytest-xdist needs them
first."""

import fcntl
import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

# the environment variable with the session's folder, set by conftest.py
FOLDER = "MEGATRON_2BW_TEST_SESSION"


def once_a_session[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """A functools.cache for all workers: the first one computes, the others wait
    and read its result.

    The key is the text of the arguments. Results travel through torch.save. Outside of
    pytest there is no cache.
    """
    results = {}

    @functools.wraps(function)
    def shared(*args: P.args, **kwargs: P.kwargs) -> R:
        import torch  # here, since every test imports this module

        if FOLDER not in os.environ:
            return function(*args, **kwargs)
        text = repr(
            (function.__module__, function.__qualname__, args, sorted(kwargs.items()))
        )
        if text not in results:
            path = Path(os.environ[FOLDER], hashlib.sha256(text.encode()).hexdigest())
            with path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    torch.save(function(*args, **kwargs), path.with_suffix(".part"))
                    path.with_suffix(".part").rename(path)
            results[text] = torch.load(path, weights_only=False)
        return results[text]

    return shared
