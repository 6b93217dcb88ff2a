"""SGMCMCJax and jax-sgmc on the logistic regression with many rows, in an environment of their own.

Neither can be imported beside a JAX of today: SGMCMCJax 0.2.13 asks for `jax.experimental.host_callback` and jax-sgmc
0.1.5 for `jax.tree_unflatten`, which are gone. So they run beside JAX 0.4.30, and a bare scan runs there with them, in
turns, for the ratio. Each chain looks at rows of its own, as both libraries have it; SGMCMCJax draws them with
replacement. jax-sgmc compiles in every call and runs chains one after another: the time of an update is the slope
between a short run and a long one. Accuracy is that of whole runs from cold caches, a third of the updates dropped;
with control variates chains start at the mode, whose search is in the seconds.

    python -m benchmarks.studies.older_peers
"""

from benchmarks.harness.store import Record, pm, run, table
from benchmarks.problems.logistic_100k import accuracy_table


def tables(record: Record) -> str:
    lines = [
        (row["program"], pm(*row["microseconds"], digits=0), pm(*row["ratio"], digits=2) if row["ratio"] else "")
        for row in record.select(part="updates")
    ]
    head = ("JAX 0.4.30, own minibatches", "µs an update", "over the bare scan's")
    return f"{table(head, lines)}\n\n{accuracy_table(record)}"


if __name__ == "__main__":
    # It is not measured again: the script that built that environment is in the history of this repository.
    run(__doc__, "older_peers", None, tables, None)
