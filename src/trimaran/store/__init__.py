"""The results store: one SQLite file of measurements, claims of running trials beside it, CSV and Parquet export."""

from trimaran.store.database import Run, Store
from trimaran.store.key import trial_key
from trimaran.store.owner import Owner, this_boot, waiting_for
from trimaran.store.table_export import export_csv, export_table

__all__ = ["Owner", "Run", "Store", "export_csv", "export_table", "this_boot", "trial_key", "waiting_for"]
