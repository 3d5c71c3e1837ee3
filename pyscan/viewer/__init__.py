"""The live viewer: a local web page over open runs."""
