"""`pyscan repair`: a whole file from a damaged one."""

from __future__ import annotations

from pyscan.commands.rewriting import Rewrite, RewritingVerb


class Repair(RewritingVerb):
    """Write a new scan with everything that is whole in a damaged one.

    Takes all whole frames and the rows of the tail file; cells lost to damage
    are absent in the new scan. The damaged file stays as it is.

    example:
      pyscan repair damaged.mscan -o run.mscan
    """

    name = "repair"

    def rewriter(self) -> Rewrite:
        from pyscan.rewrite import repair

        return repair
