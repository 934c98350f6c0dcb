"""Opens a tokenizer on a host that may not reach the Hub of Hugging Face."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_2bw.base.errors import UserError


@contextlib.contextmanager
def reached(flag: str, name: str) -> Iterator[None]:
    """The block opens a tokenizer: where the Hub does not answer at once, one of this
    host, or UserError."""
    from huggingface_hub import constants, get_session

    local = Path(name).expanduser().exists()
    if not local and not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=3)
        except Exception:  # of httpx
            os.environ["HF_HUB_OFFLINE"] = "1"
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    except Exception as error:
        if local or not constants.HF_HUB_OFFLINE:
            raise
        remedy = "--tokenizer-model FOLDER"
        if flag != "--tokenizer-model":
            remedy = f"--tokenizer-type HuggingFaceTokenizer {remedy}"
        raise UserError(
            f"{flag} {name}: it is not on this host, and the Hub is out of reach: give "
            f"{remedy}"
        ) from error
