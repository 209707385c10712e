"""Logs of trainers and exports of trackers: one module a format, and what their steps become."""
