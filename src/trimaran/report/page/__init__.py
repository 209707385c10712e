"""The page: one self-contained HTML file for a plan, a sweep or a comparison."""
