"""Rules: what each operator does to channel labels.

Data movement (`shape.py`) runs the operator itself on the label tensor, so that its index map is exact. Layers
(`linear.py`) mix channels and create new labels. Elementwise operators and norms (`elementwise.py`) unite labels.
Reductions, pooling and copies (`reduce.py`) pass channels on or freeze them. `registry.py` maps operators to rules.

Rules assume that sizes are not hard-coded. The pruned network is traced afterwards, and channels that enter code with
hard-coded sizes are frozen then (`graph/trace.py`).
"""
