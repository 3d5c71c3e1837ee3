"""Sizes of the steps that are counted: many small weights, so that what is paid per site shows."""

NUM_SITES, WIDTH, ROWS = 16, 64, 128
NUM_STEPS = 10
