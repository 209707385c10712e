"""The results store: one SQLite file of measurements, claims of running trials, CSV export."""

from trimaran.store.database import Run, Store
from trimaran.store.key import trial_key
from trimaran.store.table_export import export_csv, export_table

__all__ = ["Run", "Store", "export_csv", "export_table", "trial_key"]
