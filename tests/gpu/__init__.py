"""Tests of the kernels without a GPU; those of Triton's interpreter run in a process of their own."""
