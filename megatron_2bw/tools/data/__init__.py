"""Training data: preparation of text, and a built-in corpus made of the host's standard
library."""
