"""Questions: each measures, tabulates and perhaps draws, and imports no other."""
