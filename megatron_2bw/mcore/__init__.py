"""Everything that knows Megatron's training loop. For an entry script of your own:
`add_flags`, `check`, `install`."""

from megatron_2bw.mcore.install import add_flags, check, install
