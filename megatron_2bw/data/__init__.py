"""Data that needs no download: `corpus.build_corpus` turns the host's standard library into it."""
