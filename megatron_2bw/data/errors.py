"""What stops data preparation: each error is one line that says what to do."""


class DataError(ValueError):
    """Input or options that will not do; the line names the flag or the place in the input."""


class WorkError(RuntimeError):
    """Work that broke off: a full disk, a worker that was killed. The same command goes on."""
