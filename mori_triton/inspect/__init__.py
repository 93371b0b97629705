"""What the compilers made of kernels: `mori-triton inspect`, and the tables of docs/amd_codegen.md."""
