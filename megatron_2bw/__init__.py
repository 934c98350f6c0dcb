"""PipeDream-2BW for Megatron-core: see README.md. Importing the package changes nothing; `launch.launch` does."""

__version__ = "0.1.0"
