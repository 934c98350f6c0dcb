"""The work folder of data preparation: PREFIX.unfinished, next to the outputs.

Invariant: no existing file is overwritten. The outputs are whole before the first of them is moved into place, and .idx
comes last, so a PREFIX.idx means that all is there. The folder's content belongs to the inputs and options in its
manifest: a call with the same ones continues it, a call with others is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_2bw.data.shards import shard_path
from megatron_2bw.errors import UserError
from megatron_2bw.files import write_json


class Unfinished:
    """The work of one --output-prefix.

    manifest.json  inputs and options       tokenizer/    the new tokenizer, if one was asked for
    NNNNNNNN.npz   shards that are done      data.bin, .idx, merged.json   the result, and that it is whole
    """

    def __init__(self, prefix: Path):
        self.prefix = prefix
        self.folder = prefix.with_name(prefix.name + ".unfinished")
        self.tokenizer = self.folder / "tokenizer"
        self._merged = self.folder / "merged.json"
        self.placed_tokenizer = prefix.with_name(prefix.name + "-tokenizer")
        files = [(self.folder / f"data{end}", prefix.with_name(prefix.name + end)) for end in (".bin", ".idx")]
        self._outputs = [(self.tokenizer, self.placed_tokenizer), *files]

    def check_free(self, makes_tokenizer: bool) -> None:
        """Raise UserError if an output exists."""
        for output, place in self._outputs if makes_tokenizer else self._outputs[1:]:
            moved = self._merged.exists() and not output.exists()  # by a call that was killed while it moved them
            if place.exists() and not moved:
                raise UserError(f"--output-prefix {self.prefix}: {place} exists; remove it or give another prefix")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and lock it against a second call."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / "lock", "a")
        except OSError as error:
            raise UserError(f"--output-prefix {self.prefix}: cannot write there, {error.strerror}") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"--output-prefix {self.prefix}: another call is writing it: wait, or give another prefix"
                raise UserError(message) from None
            except OSError:
                pass  # a file system without locks
            yield

    def agree(self, manifest: dict, may_come: str) -> bool:
        """Write the manifest, or compare it with an earlier call's. Returns whether there is one.

        may_come: a flag that a later call may add: the finished shards would be the same with it.
        """
        path = self.folder / "manifest.json"
        manifest = json.loads(json.dumps(manifest))
        try:
            earlier = json.loads(path.read_text())
        except (OSError, ValueError):
            write_json(path, manifest, sync=True)
            return False
        changed = [name for name in sorted({*manifest, *earlier}) if manifest.get(name) != earlier.get(name)]
        if changed == [may_come] and manifest[may_come]:
            write_json(path, manifest, sync=True)
        elif changed:
            raise UserError(
                f"--output-prefix {self.prefix}: {self.folder} holds the work of an earlier call with other "
                f"{', '.join(changed)}: repeat that call, or remove the folder, or give another prefix"
            )
        return True

    def make_tokenizer(self, make: Callable[[Path], None]) -> None:
        """Let `make` write the tokenizer's folder, unless an earlier call has."""
        if self.tokenizer.exists():
            return
        part = self.folder / "tokenizer.part"
        shutil.rmtree(part, ignore_errors=True)  # of a call that was killed
        make(part)
        os.rename(part, self.tokenizer)

    def drop_if_unused(self) -> None:
        """Remove the folder if no shard is done: nothing is lost, and other options are then accepted."""
        if self.merged() is None and not any(self.folder.glob("*.npz")):
            self.remove()

    def done(self, number: int) -> bool:
        return shard_path(self.folder, number).exists()

    def merged(self) -> Counter[str] | None:
        """The counts of the merged result, if it is whole; parts of it may be in place already."""
        try:
            return Counter(json.loads(self._merged.read_text()))
        except FileNotFoundError:
            return None

    def set_merged(self, counts: Counter[str]) -> None:
        write_json(self._merged, counts, sync=True)

    def place(self) -> None:
        """Move the outputs into place and remove the folder."""
        for output, place in self._outputs:
            if output.exists():
                if place.exists():
                    raise UserError(f"--output-prefix {self.prefix}: {place} exists now: move it away, and call again")
                os.rename(output, place)
        self.remove()

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
