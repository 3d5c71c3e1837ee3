"""Triton kernels of pyscan, installed as `pyscan.kernels`; imported only when a tensor lives on a GPU."""
