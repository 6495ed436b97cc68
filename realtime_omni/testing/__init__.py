"""Test tools that are part of the product: clocks, fakes and contract checks."""
