"""Operators: what each kernel of a transformer does for one micro-batch on one rank.

Time, memory and operation counts derive from these lists. They say what is done and kept; how long it takes is the
cost model's to say.
"""
