"""Parts of `bench_rdna4_ep.py`: the dense baseline, the timing of alternating rounds, and the summary."""
