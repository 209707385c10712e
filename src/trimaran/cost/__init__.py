"""The cost model: memory and time of a layout, from exact counts and a handful of fitted efficiencies.

    from trimaran.cost.estimate import estimate, estimate_many
    from trimaran.cost.grid import LayoutGrid

    found = estimate(workload, cluster, stack, layout)       # Estimate: sec_per_it, time, memory, fits
    grid = LayoutGrid.build(workload, stack, dp=[8, 4], tp=[4, 8], pp=12, mbs=2, precision="fp16")
    many = estimate_many(workload, cluster, stack, grid)     # Estimates: arrays over the grid
    best = grid.layout(int(many.sec_per_it.argmin()), workload, stack)

    from trimaran.cost.simulate import pipeline_run, simulate
    timeline = simulate(pipeline_run(workload, cluster, stack, layout))   # who does what when

    from trimaran.cost.fit.solve import Observation, fit           # measured rows sharpen the efficiencies
    calibration = fit([Observation(workload, cluster, stack, layout, sec_per_it=111.9)])

Both estimates take a Calibration; without one the shipped one of the (cluster, stack) applies, and without that
the prior. Needs NumPy alone.
"""
