"""The cost model: memory and time of a layout, from exact counts and a handful of fitted efficiencies.

    from trimaran.cost.case import Case
    from trimaran.cost.estimate import estimate, estimate_many
    from trimaran.cost.grid import LayoutGrid

    case = Case.of(workload, cluster, stack)                 # with the calibration that is known of the two
    found = estimate(case, layout)                           # Estimate: sec_per_it, time, memory, fits
    grid = LayoutGrid.build(workload, stack, dp=[8, 4], tp=[4, 8], pp=12, mbs=2, precision="fp16")
    many = estimate_many(case, grid)                         # Estimates: arrays over the grid
    best = grid.layout(int(many.sec_per_it.argmin()))

    from trimaran.cost.simulate import pipeline_run, simulate
    timeline = simulate(pipeline_run(case, layout))          # who does what when

    from trimaran.cost.fit.learn import learn
    from trimaran.cost.fit.solve import Observation
    calibration, lessons = learn([Observation(case, layout, sec_per_it=111.9)])  # measured rows sharpen the rest

A Case may be given a Calibration; without one the shipped one of the (cluster, stack) applies, and without that the
prior. Needs no PyTorch.
"""
