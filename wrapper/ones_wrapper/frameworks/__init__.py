"""Elastic training for frameworks that run the loop themselves: one module for each framework, which imports it.

`steps` holds their common code. No other package of `ones_wrapper` imports these modules.
"""
