"""Report: what was measured, planned or predicted as tables, pages, figures and timelines."""
