"""What each operator does to channel labels.

Data movement needs no rule of its own: the operator itself runs on the label tensor, so its index map is exact
(`moving.py`). The other rules are for operators that mix channels and so make new labels (`mixing.py`), that
carry each channel to itself and so bind labels (`carrying.py`), and that leak or pass them (`passing.py`).
`table.py` says which operator follows which rule.

Rules are optimistic about sizes that may or may not be written into the network's code: the cut network is
traced again afterwards, and whatever does not follow the cut is frozen then (`graph/trace.py`).
"""
