"""Data that stay on the host or on disk, of which a compiled program takes rows."""

from numpyro_repulsion.rows.arguments import count_nan, host_rows, losses, share_rows
from numpyro_repulsion.rows.host import Rows
from numpyro_repulsion.rows.primitive import TAKE_ROWS
from numpyro_repulsion.rows.shards import Shards

__all__ = ["TAKE_ROWS", "Rows", "Shards", "count_nan", "host_rows", "losses", "share_rows"]
