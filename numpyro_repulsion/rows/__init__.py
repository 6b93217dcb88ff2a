"""Data that stay on the host or on disk, of which a compiled program takes rows."""

from numpyro_repulsion.rows.host import TAKE_ROWS, Rows, count_nan, host_rows, losses, share_rows
from numpyro_repulsion.rows.shards import Shards

__all__ = ["TAKE_ROWS", "Rows", "Shards", "count_nan", "host_rows", "losses", "share_rows"]
