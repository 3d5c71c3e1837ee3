"""Instructions that the hot paths execute, counted by valgrind: a measure of work that no busy machine disturbs.

`python -m benchmarks.instructions` counts and compares with benchmarks/results/instructions.json. requests.c tells
valgrind where to begin and end, counted.py hands that to core_paths.py (without torch) and hook_path.py (with torch),
which run under valgrind; __main__.py runs them and judges.
"""
