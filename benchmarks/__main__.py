"""A study's command line: measures the rows that are not stored yet, prints the tables, leaves JSON."""

import argparse
import importlib
import warnings

import jax

from benchmarks.harness.index import PAGES
from benchmarks.harness.store import Record

parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
parser.add_argument("name", choices=PAGES, metavar="NAME", help="a study, as its file in benchmarks/studies is called")
parser.add_argument("--again", action="store_true", help="begin anew, without the rows in the JSON")
asked = parser.parse_args()
study = importlib.import_module(f"benchmarks.studies.{asked.name}")
record = Record(asked.name, asked.again, jax.default_backend())
# What a sampler warns of is none of a study's rows, which ask `diagnose`.
warnings.simplefilter("ignore")
study.measure(record)
print(f"\n{study.tables(record)}\n\n{record.origin()}")
