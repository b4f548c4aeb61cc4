"""Benchmarks: floors, ours and peers in one run, so that only ratios need to be believed."""
