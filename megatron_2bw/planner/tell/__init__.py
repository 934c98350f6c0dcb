"""What a search has found: words, tables, pictures, scripts."""
