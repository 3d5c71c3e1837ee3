"""`pyscan compact`: a scan without what no reader shows."""

from __future__ import annotations

from pyscan.commands.rewriting import Rewrite, RewritingVerb


class Compact(RewritingVerb):
    """Write a new scan without what was torn or abandoned.

    Keeps the rows, events and tokens that readers show, in full frames with a
    fresh index: torn frames and rows that a resume replaced are dropped.

    example:
      pyscan compact run.mscan -o small.mscan
    """

    name = "compact"

    def rewriter(self) -> Rewrite:
        from pyscan.rewrite import compact

        return compact
