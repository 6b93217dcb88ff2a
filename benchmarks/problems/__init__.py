"""Posteriors and data sets, with what is known of them and how draws are scored."""
