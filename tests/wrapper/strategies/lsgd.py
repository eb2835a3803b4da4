"""The row of leader SGD."""

from tests.wrapper.strategies.apart import lsgd, lsgd_bytes, row

ROW = row(make=lsgd, arguments=("lsgd",), measure=lsgd_bytes)
