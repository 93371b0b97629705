"""Parts of `bench_multi_gpu.sh`: each runs under torchrun, one process per PE, and is collective throughout."""
