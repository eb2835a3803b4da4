"""Elastic training for frameworks that run the loop themselves, with one module for each framework.

`steps` holds their common code. No other package of `ones_wrapper` imports these modules.
"""
