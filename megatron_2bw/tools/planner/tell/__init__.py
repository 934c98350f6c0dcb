"""The result of a search as words, tables, pictures and scripts."""
