"""`pyscan merge`: the files of all ranks as one."""

from __future__ import annotations

from pyscan.commands.rewriting import Rewrite, RewritingVerb


class Merge(RewritingVerb):
    """Write the files of all ranks as one scan.

    SCAN is the name the ranks were given: run.mscan stands for
    run.rank00000.mscan, run.rank00001.mscan and so on.

    example:
      pyscan merge run.mscan -o whole.mscan
    """

    name = "merge"

    def rewriter(self) -> Rewrite:
        from pyscan.rewrite import merge

        return merge
