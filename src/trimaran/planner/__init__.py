"""The planner: every valid layout ranked by the cost model, and why the others fall out."""
