"""The row of DecentLaM, in a ring."""

from tests.wrapper.strategies.apart import decentlam, decentlam_bytes, row

ROW = row(make=decentlam, arguments=("decentlam",), measure=decentlam_bytes)
