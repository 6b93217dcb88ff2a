"""What every study stands on: stored rows, runs, pages and the index."""
