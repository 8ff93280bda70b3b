"""Reports on a compiled program: summary, tables, HTML page, explanations and comparisons."""
