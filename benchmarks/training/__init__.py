"""A training step with and without a scanner, each contestant in a process of its own: `python -m benchmarks.training`.

models.py builds what is trained, contestants.py attaches what is compared, worker.py takes steps on request,
processes.py lets workers share the machine, rounds.py asks them for turns, ratios.py compares what they took, report.py
makes the table, the picture and the kept result.
"""
