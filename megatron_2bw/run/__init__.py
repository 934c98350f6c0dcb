"""What starts a run: the command line, its checks, the entry scripts' tasks, the start and end of the ranks."""
