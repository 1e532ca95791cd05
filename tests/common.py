"""The tests' names for the tolerance rule and the checks built on it: braze/testing.py."""

from braze.testing import DTYPES, assert_by_rule, check_against_stock, layouts

__all__ = ["DTYPES", "assert_by_rule", "check_against_stock", "layouts"]
