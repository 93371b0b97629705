"""Benchmarks. Run from the repository's root: `python bench/bench_intranode.py`, see docs/benchmarks.md."""
