"""The search for the fastest legal plans."""
