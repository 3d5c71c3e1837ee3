"""`pyscan import`: a version 1.1 scan as version 2."""

from __future__ import annotations

from pyscan.commands.rewriting import Rewrite, RewritingVerb


class Import(RewritingVerb):
    """Write a version 1.1 scan as version 2, every value as it is.

    example:
      pyscan import old.mscan -o new.mscan
    """

    name = "import"

    def rewriter(self) -> Rewrite:
        from pyscan.convert import import_version1

        return import_version1
