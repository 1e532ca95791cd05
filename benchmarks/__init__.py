"""Benchmarks: a module per op with its list of cases; harness.py runs them, render.py makes the
tables of the documents from the results. Run with ``python -m braze bench`` in a checkout."""
