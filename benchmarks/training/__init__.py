"""A training step with and without a scanner, contestants as twins in one process: `python -m benchmarks.training`.

models.py builds what is trained and its twins, contestants.py attaches what is compared, worker.py takes steps on
request in a process of its own, billing.py tells whose processor time it was, rounds.py asks for turns, ratios.py
compares what they took, report.py makes the table, the picture and the kept result.
"""
